// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
)

func TestFilter(t *testing.T) {
	flow := &weftv1.Flow{
		Time: &timestamppb.Timestamp{Seconds: 100}, Type: weftv1.FlowType_FLOW_TYPE_DROP, Verdict: weftv1.Verdict_VERDICT_DROPPED,
		Reason: "spoofed-address", Protocol: "TCP",
		Source:      &weftv1.FlowEndpoint{Namespace: "shop", Pod: "web", Kind: KindPod},
		Destination: &weftv1.FlowEndpoint{Kind: KindWorld},
		Direction:   "egress", DevicePod: "mall/liar", // who really sent it
	}
	for _, c := range []struct {
		name string
		req  *weftv1.ObserveRequest
		want bool
	}{
		{"nothing asked", &weftv1.ObserveRequest{}, true},
		{"from this pod", &weftv1.ObserveRequest{FromPod: []string{"shop/web"}}, true},
		{"from its namespace", &weftv1.ObserveRequest{FromPod: []string{"shop/"}}, true},
		{"from one of two", &weftv1.ObserveRequest{FromPod: []string{"shop/db", "shop/web"}}, true},
		{"from another", &weftv1.ObserveRequest{FromPod: []string{"shop/we"}}, false},
		{"from the pod that sent it", &weftv1.ObserveRequest{FromPod: []string{"mall/liar"}}, true},
		{"to the pod that sent it", &weftv1.ObserveRequest{ToPod: []string{"mall/liar"}}, false},
		{"sent by it", &weftv1.ObserveRequest{Pod: []string{"mall/"}}, true},
		{"to this pod", &weftv1.ObserveRequest{ToPod: []string{"shop/web"}}, false},
		{"either side", &weftv1.ObserveRequest{Pod: []string{"shop/web"}}, true},
		{"either side, other namespace", &weftv1.ObserveRequest{Pod: []string{"sho/"}}, false},
		{"from and to", &weftv1.ObserveRequest{FromPod: []string{"shop/"}, ToPod: []string{"shop/"}}, false},
		{"dropped", &weftv1.ObserveRequest{Verdict: []weftv1.Verdict{weftv1.Verdict_VERDICT_DROPPED}}, true},
		{"forwarded", &weftv1.ObserveRequest{Verdict: []weftv1.Verdict{weftv1.Verdict_VERDICT_FORWARDED}}, false},
		{"reason", &weftv1.ObserveRequest{Reason: []string{"spoofed-address"}}, true},
		{"other reason", &weftv1.ObserveRequest{Reason: []string{"no-route"}}, false},
		{"protocol in small letters", &weftv1.ObserveRequest{Protocol: []string{"tcp"}}, true},
		{"protocol by number", &weftv1.ObserveRequest{Protocol: []string{"6"}}, true},
		{"other protocol", &weftv1.ObserveRequest{Protocol: []string{"icmpv6", "132"}}, false},
		{"type", &weftv1.ObserveRequest{Type: []weftv1.FlowType{weftv1.FlowType_FLOW_TYPE_DROP}}, true},
		{"other type", &weftv1.ObserveRequest{Type: []weftv1.FlowType{weftv1.FlowType_FLOW_TYPE_NEW}}, false},
		{"since its time", &weftv1.ObserveRequest{Since: &timestamppb.Timestamp{Seconds: 100}}, true},
		{"since later", &weftv1.ObserveRequest{Since: &timestamppb.Timestamp{Seconds: 100, Nanos: 1}}, false},
	} {
		f, err := newFilter(c.req, []string{"spoofed-address", "no-route"})
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
		} else if got := f.wants(&weftv1.ObserveResponse{Item: &weftv1.ObserveResponse_Flow{Flow: flow}}); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestBadFilterSaysWhatIsWanted(t *testing.T) {
	for _, c := range []struct {
		req  *weftv1.ObserveRequest
		want string
	}{
		{&weftv1.ObserveRequest{FromPod: []string{"web"}}, `from_pod "web": want NAMESPACE/NAME, or NAMESPACE/ for every pod of a namespace`},
		{&weftv1.ObserveRequest{ToPod: []string{"/web"}}, `to_pod "/web": want NAMESPACE/NAME`},
		{&weftv1.ObserveRequest{Pod: []string{"a/b/c"}}, `pod "a/b/c": want NAMESPACE/NAME`},
		{&weftv1.ObserveRequest{Verdict: []weftv1.Verdict{0}}, `verdict 0: want one of VERDICT_FORWARDED (1), VERDICT_DROPPED (2)`},
		{&weftv1.ObserveRequest{Verdict: []weftv1.Verdict{9}}, `verdict 9: want one of`},
		{&weftv1.ObserveRequest{Type: []weftv1.FlowType{7}}, `type 7: want one of FLOW_TYPE_NEW (1), `},
		{&weftv1.ObserveRequest{Reason: []string{"spoof"}}, `reason "spoof": want the name of a drop reason: no-route, spoofed-address`},
		{&weftv1.ObserveRequest{Protocol: []string{"256"}}, `protocol "256": want TCP, UDP, ICMP, ICMPv6 or an IP protocol number from 0 to 255`},
		{&weftv1.ObserveRequest{Protocol: []string{""}}, `protocol "": want TCP`},
		{&weftv1.ObserveRequest{Since: &timestamppb.Timestamp{Nanos: -1}}, `want a time between the years 1 and 9999`},
	} {
		_, err := newFilter(c.req, []string{"spoofed-address", "no-route"})
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: got %v, want %q", c.req, err, c.want)
		}
	}
}
