// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"context"
	"errors"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/state"
)

// node is the Node service.
type node struct {
	weftv1.UnimplementedNodeServer
	providers Providers
}

// Status implements weftv1.NodeServer.
func (n *node) Status(context.Context, *weftv1.StatusRequest) (*weftv1.StatusResponse, error) {
	return n.providers.Status(), nil
}

// ListTable implements weftv1.NodeServer.
func (n *node) ListTable(_ context.Context, req *weftv1.ListTableRequest) (*weftv1.ListTableResponse, error) {
	list, err := n.providers.Tables.List(req.Name)
	var none *state.ErrNoTable
	switch {
	case errors.As(err, &none):
		return nil, status.Error(codes.NotFound, err.Error())
	case err != nil:
		return nil, status.Error(codes.Internal, err.Error())
	}
	resp := &weftv1.ListTableResponse{Header: list.Header}
	for i, cells := range list.Cells {
		resp.Rows = append(resp.Rows, &weftv1.TableRow{Cells: cells, Json: list.JSON[i]})
	}
	return resp, nil
}

// Observe implements weftv1.NodeServer.
func (n *node) Observe(req *weftv1.ObserveRequest, stream grpc.ServerStreamingServer[weftv1.ObserveResponse]) error {
	return n.providers.Flows.Observe(stream.Context(), req, stream.Send)
}

// WaitApplied implements weftv1.NodeServer.
func (n *node) WaitApplied(ctx context.Context, req *weftv1.WaitAppliedRequest) (*weftv1.WaitAppliedResponse, error) {
	if n.providers.WaitApplied == nil {
		return nil, status.Error(codes.FailedPrecondition, "this agent has no manifest folder (source.folder in its config)")
	}
	generation, refused, err := n.providers.WaitApplied(ctx, req.Generation)
	if err != nil {
		return nil, err
	}
	return &weftv1.WaitAppliedResponse{Generation: generation, SourceErrors: refused}, nil
}
