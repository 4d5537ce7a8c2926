// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"context"
	"errors"
	"runtime/debug"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// errStopping is the cause of calls that end because the agent stops.
var errStopping = errors.New("the agent is stopping")

// guard returns a context that ends when the server stops.
func (s *Server) guard(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		select {
		case <-s.stopping:
			cancel(errStopping)
		case <-done:
		}
	}()
	return ctx, func() { close(done); cancel(nil) }
}

func (s *Server) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (resp any, err error) {
	ctx, release := s.guard(ctx)
	defer release()
	defer s.recover(info.FullMethod, &err)
	resp, err = handle(ctx, req)
	return resp, explain(ctx, err)
}

func (s *Server) stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) (err error) {
	ctx, release := s.guard(stream.Context())
	defer release()
	defer s.recover(info.FullMethod, &err)
	return explain(ctx, handle(srv, &guarded{ServerStream: stream, ctx: ctx}))
}

// recover turns a panic of a call into an error of that call alone.
func (s *Server) recover(method string, err *error) {
	p := recover()
	if p == nil {
		return
	}
	s.panics.Add(1)
	s.log.Error("panic in a call", "method", method, "panic", p, "stack", string(debug.Stack()))
	*err = status.Errorf(codes.Internal, "%s: the agent met an internal error; its log has the details", method)
}

// explain gives the error of a call its code.
func explain(ctx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(context.Cause(ctx), errStopping):
		return status.Error(codes.Unavailable, errStopping.Error())
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		return status.FromContextError(ctx.Err()).Err()
	}
	return status.Error(codes.Unknown, err.Error())
}

// guarded is a stream with another context.
type guarded struct {
	grpc.ServerStream
	ctx context.Context
}

func (g *guarded) Context() context.Context { return g.ctx }
