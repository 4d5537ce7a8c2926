// SPDX-License-Identifier: Apache-2.0

// Package plugin is the CNI plugin weft-cni: it reads the network configuration
// and asks the agent. The one thing that it does by itself is a DEL while no
// agent answers, which must succeed.
package plugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/source/cni/tombstone"
)

// errNotAvailable is the code of a STATUS that says: no ADD can be served.
const errNotAvailable uint = 50

// Timeouts bound each command. ADD leaves room for the agent's own wait for the
// pod's row.
type Timeouts struct {
	Add, Check, Del, Status, GC time.Duration
}

// DefaultTimeouts are those of the weft-cni command.
var DefaultTimeouts = Timeouts{
	Add:    60 * time.Second,
	Check:  20 * time.Second,
	Del:    5 * time.Second,
	Status: 5 * time.Second,
	GC:     60 * time.Second,
}

// Versions are the CNI versions that the plugin speaks.
func Versions() version.PluginInfo { return version.VersionsStartingFrom("0.3.1") }

// Plugin carries out CNI commands.
type Plugin struct {
	Stdout   io.Writer // gets the result of an ADD
	Timeouts Timeouts
}

// Funcs returns the commands, as skel calls them.
func (p *Plugin) Funcs() skel.CNIFuncs {
	return skel.CNIFuncs{Add: p.Add, Check: p.Check, Del: p.Del, Status: p.Status, GC: p.GC}
}

// call runs f with a client of the agent.
func call(socket string, timeout time.Duration, f func(context.Context, weftv1.CniClient) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy())
	if err != nil {
		return fmt.Errorf("connect to the weft agent at %s: %w", socket, err)
	}
	defer conn.Close()
	return f(ctx, weftv1.NewCniClient(conn))
}

// codeOf gives each status of the agent the CNI error code that makes a runtime
// do the right thing.
var codeOf = map[codes.Code]uint{
	codes.Unavailable:        types.ErrTryAgainLater,
	codes.DeadlineExceeded:   types.ErrTryAgainLater,
	codes.Canceled:           types.ErrTryAgainLater,
	codes.ResourceExhausted:  types.ErrTryAgainLater,
	codes.FailedPrecondition: types.ErrTryAgainLater,
	codes.NotFound:           types.ErrUnknownContainer,
	codes.InvalidArgument:    types.ErrInvalidNetworkConfig,
	codes.AlreadyExists:      types.ErrInvalidNetworkConfig,
}

// explain turns an error of the agent into one of CNI.
func explain(socket string, err error) error {
	if err == nil {
		return nil
	}
	st, _ := status.FromError(err)
	code, ok := codeOf[st.Code()]
	if !ok {
		code = types.ErrInternal
	}
	msg := "weft: " + st.Message()
	if noAnswer(err) {
		msg = fmt.Sprintf("weft: the agent at %s does not answer", socket)
		return types.NewError(code, msg, st.Message())
	}
	return types.NewError(code, msg, "")
}

// noAnswer says whether the agent is down or hangs.
func noAnswer(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Unimplemented:
		return true
	}
	return false
}

// Add wires the pod.
func (p *Plugin) Add(args *skel.CmdArgs) error {
	conf, err := parse(args.StdinData)
	if err != nil {
		return err
	}
	if err := conf.refuseHostPorts(); err != nil {
		return err
	}
	pod, err := podOf(args.Args)
	if err != nil {
		return err
	}
	var r *weftv1.CniAddResponse
	err = call(conf.Socket, p.Timeouts.Add, func(ctx context.Context, c weftv1.CniClient) (err error) {
		r, err = c.Add(ctx, &weftv1.CniAddRequest{
			ContainerId: args.ContainerID, Netns: args.Netns, Interface: args.IfName, Network: conf.Name,
			PodNamespace: pod.namespace, PodName: pod.name, PodUid: pod.uid,
		})
		return err
	})
	if err != nil {
		return explain(conf.Socket, err)
	}
	res, err := result(r, args)
	if err != nil {
		return err
	}
	old, err := res.GetAsVersion(conf.CNIVersion)
	if err != nil {
		return types.NewError(types.ErrIncompatibleCNIVersion, fmt.Sprintf("weft: result for version %s: %v", conf.CNIVersion, err), "")
	}
	return old.PrintTo(p.Stdout)
}

// result is the answer of an ADD: interface 0 is the node's side, 1 the pod's.
func result(r *weftv1.CniAddResponse, args *skel.CmdArgs) (*current.Result, error) {
	out := &current.Result{
		CNIVersion: current.ImplementedSpecVersion,
		Interfaces: []*current.Interface{
			{Name: r.HostInterface, Mac: r.HostMac, Mtu: int(r.Mtu)},
			{Name: args.IfName, Mac: r.Mac, Mtu: int(r.Mtu), Sandbox: args.Netns},
		},
	}
	for _, ip := range r.Ips {
		n, err := types.ParseCIDR(ip.Address)
		if err != nil {
			return nil, fmt.Errorf("answer of the weft agent: address %q: %w", ip.Address, err)
		}
		out.IPs = append(out.IPs, &current.IPConfig{Interface: current.Int(1), Address: *n, Gateway: net.ParseIP(ip.Gateway)})
	}
	for _, x := range r.Routes {
		_, dst, err := net.ParseCIDR(x.Destination)
		if err != nil {
			return nil, fmt.Errorf("answer of the weft agent: route %q: %w", x.Destination, err)
		}
		out.Routes = append(out.Routes, &types.Route{Dst: *dst, GW: net.ParseIP(x.Gateway)})
	}
	return out, nil
}

// Check asks whether the pod is still as the ADD left it.
func (p *Plugin) Check(args *skel.CmdArgs) error {
	conf, err := parse(args.StdinData)
	if err != nil {
		return err
	}
	ips, err := conf.previousIPs()
	if err != nil {
		return err
	}
	return explain(conf.Socket, call(conf.Socket, p.Timeouts.Check, func(ctx context.Context, c weftv1.CniClient) error {
		_, err := c.Check(ctx, &weftv1.CniCheckRequest{ContainerId: args.ContainerID, Interface: args.IfName, Netns: args.Netns, Ips: ips})
		return err
	}))
}

// Del unwires the pod. While no agent answers, it removes the pod's interface
// itself and leaves a note to the agent, which has the address to release.
func (p *Plugin) Del(args *skel.CmdArgs) error {
	conf, err := parse(args.StdinData)
	if err != nil {
		return err
	}
	t := tombstone.Tombstone{ContainerID: args.ContainerID, Interface: args.IfName, Network: conf.Name, Netns: args.Netns}
	err = call(conf.Socket, p.Timeouts.Del, func(ctx context.Context, c weftv1.CniClient) error {
		_, err := c.Del(ctx, &weftv1.CniDelRequest{ContainerId: args.ContainerID, Interface: args.IfName, Netns: args.Netns, Network: conf.Name})
		return err
	})
	switch {
	case err == nil:
		return tombstone.Remove(conf.StateDir, t)
	case !noAnswer(err):
		return explain(conf.Socket, err)
	}
	if err := tombstone.Write(conf.StateDir, t); err != nil {
		return types.NewError(types.ErrIOFailure, fmt.Sprintf("weft: the agent at %s does not answer, and no note could be left: %v", conf.Socket, err), "")
	}
	if args.Netns == "" {
		return nil
	}
	return netdev.DeletePodInterface(args.Netns, args.IfName, args.ContainerID+"/"+args.IfName)
}

// Status says whether an ADD could be served.
func (p *Plugin) Status(args *skel.CmdArgs) error {
	conf, err := parse(args.StdinData)
	if err != nil {
		return err
	}
	err = explain(conf.Socket, call(conf.Socket, p.Timeouts.Status, func(ctx context.Context, c weftv1.CniClient) error {
		_, err := c.Ready(ctx, &weftv1.CniReadyRequest{})
		return err
	}))
	var e *types.Error
	if errors.As(err, &e) {
		return types.NewError(errNotAvailable, e.Msg, e.Details)
	}
	return err
}

// GC releases what the runtime does not name.
func (p *Plugin) GC(args *skel.CmdArgs) error {
	conf, err := parse(args.StdinData)
	if err != nil {
		return err
	}
	r := &weftv1.CniGcRequest{Network: conf.Name}
	for _, a := range conf.ValidAttachments {
		r.Valid = append(r.Valid, &weftv1.CniAttachment{ContainerId: a.ContainerID, Interface: a.IfName})
	}
	return explain(conf.Socket, call(conf.Socket, p.Timeouts.GC, func(ctx context.Context, c weftv1.CniClient) error {
		_, err := c.Gc(ctx, r)
		return err
	}))
}
