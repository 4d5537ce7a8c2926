// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"sync/atomic"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/datapath/deny"
	"github.com/weft-mesh/weft/internal/enforce"
	"github.com/weft-mesh/weft/internal/flow"
	"github.com/weft-mesh/weft/internal/services"
	"github.com/weft-mesh/weft/internal/source/cni"
)

// gate answers the parts of the API that come up late: until then with
// UNAVAILABLE, so that the caller tries again.
type gate struct {
	weftv1.UnimplementedCniServer
	cni   atomic.Pointer[cni.Server]
	flows atomic.Pointer[flow.Observer]

	enforce  atomic.Pointer[enforce.Enforcer]
	services atomic.Pointer[services.Driver]
	deny     atomic.Pointer[deny.List]
}

var errStarting = status.Error(codes.Unavailable, "the agent is starting; weft status says what it waits for")

func (g *gate) open(s *cni.Server)       { g.cni.Store(s) }
func (g *gate) observe(o *flow.Observer) { g.flows.Store(o) }
func (g *gate) observer() *flow.Observer { return g.flows.Load() }

// Observe streams flows once they are read.
func (g *gate) Observe(ctx context.Context, req *weftv1.ObserveRequest, send func(*weftv1.ObserveResponse) error) error {
	if o := g.flows.Load(); o != nil {
		return o.Observe(ctx, req, send)
	}
	return errStarting
}

func pass[Req, Resp any](g *gate, ctx context.Context, req Req, call func(*cni.Server, context.Context, Req) (Resp, error)) (Resp, error) {
	if s := g.cni.Load(); s != nil {
		return call(s, ctx, req)
	}
	var none Resp
	return none, errStarting
}

func (g *gate) Add(ctx context.Context, r *weftv1.CniAddRequest) (*weftv1.CniAddResponse, error) {
	return pass(g, ctx, r, (*cni.Server).Add)
}

func (g *gate) Del(ctx context.Context, r *weftv1.CniDelRequest) (*weftv1.CniDelResponse, error) {
	return pass(g, ctx, r, (*cni.Server).Del)
}

func (g *gate) Check(ctx context.Context, r *weftv1.CniCheckRequest) (*weftv1.CniCheckResponse, error) {
	return pass(g, ctx, r, (*cni.Server).Check)
}

func (g *gate) Ready(ctx context.Context, r *weftv1.CniReadyRequest) (*weftv1.CniReadyResponse, error) {
	return pass(g, ctx, r, (*cni.Server).Ready)
}

func (g *gate) Gc(ctx context.Context, r *weftv1.CniGcRequest) (*weftv1.CniGcResponse, error) {
	return pass(g, ctx, r, (*cni.Server).Gc)
}
