// SPDX-License-Identifier: Apache-2.0

// Command weft is the node agent, the lab and the command line of weft.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/weft-mesh/weft/internal/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := cli.Run(ctx, os.Args[1:], cli.IO{In: os.Stdin, Out: os.Stdout, Err: os.Stderr})
	stop()
	os.Exit(code)
}
