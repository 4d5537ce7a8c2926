// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/admin/dial"
)

const (
	defaultSocket = "/run/weft/weft.sock"
	socketEnv     = "WEFT_SOCKET"
)

// agentFlag is where a command finds the agent.
type agentFlag struct{ socket string }

func (a *agentFlag) register(cmd *cobra.Command) {
	cmd.Flags().StringVar(&a.socket, "socket", "", "unix socket of the agent (default $"+socketEnv+", else "+defaultSocket+")")
}

// call gives f a client of the agent and makes its error readable.
func (a *agentFlag) call(ctx context.Context, f func(weftv1.NodeClient) error) error {
	path := a.socket
	if path == "" {
		path = os.Getenv(socketEnv)
	}
	if path == "" {
		path = defaultSocket
	}
	conn, err := dial.Agent(path)
	if err != nil {
		return err
	}
	defer conn.Close()
	return readable(ctx, path, f(weftv1.NewNodeClient(conn)))
}

// readable turns a gRPC status into what a user wants to read. Ending a
// command by a signal is no error.
func readable(ctx context.Context, path string, err error) error {
	if err == nil || ctx.Err() != nil && errors.Is(ctx.Err(), context.Canceled) {
		return nil
	}
	st, ok := status.FromError(err)
	if !ok {
		return err
	}
	if st.Code() == codes.Unavailable {
		return fmt.Errorf("the agent on %s does not answer any more: %s", path, st.Message())
	}
	return errors.New(st.Message())
}
