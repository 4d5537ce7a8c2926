// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/datapath/event"
)

// podRef is "NS/NAME", or "NS/" for every pod of a namespace.
type podRef struct{ namespace, name string }

// filter says which flows a client wants: within a field any of the values,
// and every field that has values. The zero filter takes all. Immutable.
type filter struct {
	since            time.Time
	from, to, either []podRef
	verdicts         []weftv1.Verdict
	reasons          []string
	protocols        []string
	types            []weftv1.FlowType
}

// newFilter checks r. Its errors are InvalidArgument and say what was
// expected. reasons are the names of drop reasons there are; nil accepts any.
func newFilter(r *weftv1.ObserveRequest, reasons []string) (*filter, error) {
	f := &filter{}
	var err error
	if r.Since != nil {
		if e := r.Since.CheckValid(); e != nil {
			return nil, invalid("since %s: want a time between the years 1 and 9999", r.Since)
		}
		f.since = r.Since.AsTime()
	}
	if f.from, err = parsePods("from_pod", r.FromPod); err != nil {
		return nil, err
	}
	if f.to, err = parsePods("to_pod", r.ToPod); err != nil {
		return nil, err
	}
	if f.either, err = parsePods("pod", r.Pod); err != nil {
		return nil, err
	}
	if f.verdicts, err = parseEnum("verdict", r.Verdict, weftv1.Verdict_name); err != nil {
		return nil, err
	}
	if f.types, err = parseEnum("type", r.Type, weftv1.FlowType_name); err != nil {
		return nil, err
	}
	if f.reasons, err = parseReasons(r.Reason, reasons); err != nil {
		return nil, err
	}
	f.protocols, err = parseProtocols(r.Protocol)
	return f, err
}

func invalid(format string, args ...any) error {
	return status.Errorf(codes.InvalidArgument, format, args...)
}

func parsePods(field string, values []string) ([]podRef, error) {
	var refs []podRef
	for _, v := range values {
		namespace, name, ok := strings.Cut(v, "/")
		if !ok || namespace == "" || strings.Contains(name, "/") {
			return nil, invalid("%s %q: want NAMESPACE/NAME, or NAMESPACE/ for every pod of a namespace", field, v)
		}
		refs = append(refs, podRef{namespace, name})
	}
	return refs, nil
}

func parseEnum[E ~int32](field string, values []E, names map[int32]string) ([]E, error) {
	for _, v := range values {
		if _, ok := names[int32(v)]; ok && v != 0 {
			continue
		}
		return nil, invalid("%s %d: want one of %s", field, v, enumNames(names))
	}
	return values, nil
}

func enumNames(names map[int32]string) string {
	var all []string
	for i := int32(1); i < int32(len(names)); i++ {
		all = append(all, fmt.Sprintf("%s (%d)", names[i], i))
	}
	return strings.Join(all, ", ")
}

func parseReasons(values, known []string) ([]string, error) {
	for _, v := range values {
		if v == "" || known != nil && !slices.Contains(known, v) {
			sorted := slices.Sorted(slices.Values(known))
			return nil, invalid("reason %q: want the name of a drop reason: %s", v, strings.Join(sorted, ", "))
		}
	}
	return values, nil
}

func parseProtocols(values []string) ([]string, error) {
	var out []string
	for _, v := range values {
		name, ok := canonicalProtocol(v)
		if !ok {
			return nil, invalid("protocol %q: want TCP, UDP, ICMP, ICMPv6 or an IP protocol number from 0 to 255", v)
		}
		out = append(out, name)
	}
	return out, nil
}

func canonicalProtocol(v string) (string, bool) {
	for _, p := range []uint8{protocolTCP, protocolUDP, protocolICMP, protocolICMPv6} {
		if strings.EqualFold(v, protocolName(p)) {
			return protocolName(p), true
		}
	}
	n, err := strconv.ParseUint(v, 10, 8)
	return protocolName(uint8(n)), err == nil
}

// wants says whether an item of the stream is for this client. What was lost
// is for everybody: it may have been what the client asked for.
func (f *filter) wants(r *weftv1.ObserveResponse) bool {
	if flow := r.GetFlow(); flow != nil {
		return f.wantsFlow(flow)
	}
	to := r.GetLost().GetTo()
	return f.since.IsZero() || to == nil || !to.AsTime().Before(f.since)
}

func (f *filter) wantsFlow(w *weftv1.Flow) bool {
	return (f.since.IsZero() || !w.Time.AsTime().Before(f.since)) &&
		oneOf(f.verdicts, w.Verdict) &&
		oneOf(f.types, w.Type) &&
		oneOf(f.reasons, w.Reason) &&
		oneOf(f.protocols, w.Protocol) &&
		(anyPod(f.from, w.Source) || sentBy(f.from, w)) &&
		anyPod(f.to, w.Destination) &&
		(anyPod(f.either, w.Source) || anyPod(f.either, w.Destination) || sentBy(f.either, w))
}

// sentBy says whether one of the pods sent the packet, whatever source address
// it bears.
func sentBy(wanted []podRef, w *weftv1.Flow) bool {
	if w.Direction != directionName(event.DirectionEgress) {
		return false
	}
	namespace, name, ok := strings.Cut(w.DevicePod, "/")
	return ok && anyPod(wanted, &weftv1.FlowEndpoint{Namespace: namespace, Pod: name})
}

func oneOf[T comparable](wanted []T, v T) bool {
	return len(wanted) == 0 || slices.Contains(wanted, v)
}

func anyPod(wanted []podRef, e *weftv1.FlowEndpoint) bool {
	if len(wanted) == 0 {
		return true
	}
	for _, p := range wanted {
		if e.Pod != "" && p.namespace == e.Namespace && (p.name == "" || p.name == e.Pod) {
			return true
		}
	}
	return false
}

// newest returns what of kept, oldest first, the client wants: with last not
// 0 at most so many flows, the newest, and what was lost between them.
func (f *filter) newest(kept []*weftv1.ObserveResponse, last uint32) []*weftv1.ObserveResponse {
	var out []*weftv1.ObserveResponse
	flows := uint32(0)
	for _, r := range slices.Backward(kept) {
		if !f.wants(r) {
			continue
		}
		out = append(out, r)
		if r.GetFlow() == nil {
			continue
		}
		if flows++; flows == last {
			break
		}
	}
	slices.Reverse(out)
	return out
}
