// SPDX-License-Identifier: Apache-2.0

// Package dial connects to an agent over its unix socket. It is apart from
// package admin so that the CNI plugin stays small.
package dial

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// MaxResponse is the size of the largest response, in bytes: a table of a big
// cluster.
const MaxResponse = 64 << 20

// timeout is how long an agent may take to accept a connection.
const timeout = 2 * time.Second

// Agent returns a connection to the agent at the unix socket path. It fails at
// once, and says why, when no agent answers there.
func Agent(path string) (*grpc.ClientConn, error) {
	c, err := net.DialTimeout("unix", path, timeout)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ENOTDIR):
		return nil, fmt.Errorf("no agent answers on %s: is weft agent running on this node?", path)
	case errors.Is(err, os.ErrPermission):
		return nil, fmt.Errorf("dial %s: permission denied: only root may talk to the agent", path)
	case err != nil:
		return nil, fmt.Errorf("dial the agent: %w", err)
	}
	c.Close()
	conn, err := grpc.NewClient("passthrough:///weft",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxResponse)),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}),
	)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", path, err)
	}
	return conn, nil
}
