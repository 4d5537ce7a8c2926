// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
)

// flowLine is a line of "weft observe -o json"; the names of the fields stay.
// One of the fields is set.
type flowLine struct {
	Flow *flowJSON `json:"flow,omitempty"`
	Lost *lostJSON `json:"lost,omitempty"`
}

type flowJSON struct {
	Time        *time.Time   `json:"time,omitempty"`
	Node        string       `json:"node"`
	Type        string       `json:"type"`    // new, update, close, drop
	Verdict     string       `json:"verdict"` // forwarded, dropped
	Reason      string       `json:"reason,omitempty"`
	Policy      string       `json:"policy,omitempty"` // rule that refused it
	Protocol    string       `json:"protocol"`
	Direction   string       `json:"direction"`
	Source      endpointJSON `json:"source"`
	Destination endpointJSON `json:"destination"`
	TCPFlags    string       `json:"tcpFlags,omitempty"`
	ICMPType    *uint32      `json:"icmpType,omitempty"`
	ICMPCode    *uint32      `json:"icmpCode,omitempty"`
	Packets     uint64       `json:"packets"`
	Bytes       uint64       `json:"bytes"`
	Device      string       `json:"device,omitempty"`
	DevicePod   string       `json:"devicePod,omitempty"` // NS/NAME, of this node
	CPU         uint32       `json:"cpu"`
	Sequence    uint64       `json:"sequence"`
}

type endpointJSON struct {
	Kind      string            `json:"kind"`
	IP        string            `json:"ip"`
	Port      uint32            `json:"port"`
	Identity  uint64            `json:"identity"`
	Namespace string            `json:"namespace,omitempty"`
	Pod       string            `json:"pod,omitempty"`
	Labels    map[string]string `json:"labels,omitempty"`
}

type lostJSON struct {
	Count uint64     `json:"count"`
	Where string     `json:"where"`         // kernel-ring, observer
	CPU   *uint32    `json:"cpu,omitempty"` // of kernel-ring
	From  *time.Time `json:"from,omitempty"`
	To    *time.Time `json:"to,omitempty"`
}

const whereKernelRing = "kernel-ring"

func toFlowLine(r *weftv1.ObserveResponse) flowLine {
	if l := r.GetLost(); l != nil {
		lost := &lostJSON{Count: l.Count, Where: l.Where, From: toTime(l.From), To: toTime(l.To)}
		if l.Where == whereKernelRing {
			lost.CPU = &l.Cpu
		}
		return flowLine{Lost: lost}
	}
	f := r.GetFlow()
	flow := &flowJSON{
		Time: toTime(f.GetTime()), Node: f.GetNode(),
		Type:    shortName(f.GetType().String(), flowTypePrefix),
		Verdict: shortName(f.GetVerdict().String(), verdictPrefix),
		Reason:  f.GetReason(), Policy: f.GetPolicy(), Protocol: f.GetProtocol(), Direction: f.GetDirection(),
		Source: toEndpoint(f.GetSource()), Destination: toEndpoint(f.GetDestination()),
		TCPFlags: f.GetTcpFlags(), Packets: f.GetPackets(), Bytes: f.GetBytes(),
		Device: f.GetDevice(), DevicePod: f.GetDevicePod(), CPU: f.GetCpu(), Sequence: f.GetSequence(),
	}
	if isICMP(f) {
		flow.ICMPType, flow.ICMPCode = &f.IcmpType, &f.IcmpCode
	}
	return flowLine{Flow: flow}
}

func isICMP(f *weftv1.Flow) bool { return strings.HasPrefix(f.GetProtocol(), "ICMP") }

func toEndpoint(e *weftv1.FlowEndpoint) endpointJSON {
	return endpointJSON{
		Kind: e.GetKind(), IP: e.GetIp(), Port: e.GetPort(), Identity: e.GetIdentity(),
		Namespace: e.GetNamespace(), Pod: e.GetPod(), Labels: e.GetLabels(),
	}
}

func toTime(t *timestamppb.Timestamp) *time.Time {
	if t == nil {
		return nil
	}
	u := t.AsTime()
	return &u
}

// flowLines prints items as JSON, one a line.
type flowLines struct{ enc *json.Encoder }

func newFlowLines(w io.Writer) *flowLines {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return &flowLines{enc: enc}
}

func (p *flowLines) print(r *weftv1.ObserveResponse) error { return p.enc.Encode(toFlowLine(r)) }

// flowTable prints items as a table.
type flowTable struct {
	w       io.Writer
	columns columns
	started bool
}

// clock is the form of times in tables.
const clock = "15:04:05.000000"

func newFlowTable(w io.Writer) *flowTable {
	t := &flowTable{w: w}
	// Room for usual values, so that the columns of a short list stand still.
	t.columns.widths = []int{len(clock), len("update"), len("forwarded"), len("ICMPv6"), 24, 24}
	return t
}

func (p *flowTable) print(r *weftv1.ObserveResponse) error {
	if l := r.GetLost(); l != nil {
		_, err := fmt.Fprintln(p.w, lostText(l))
		return err
	}
	if !p.started {
		p.started = true
		if err := p.columns.write(p.w, []string{"TIME (UTC)", "TYPE", "VERDICT", "PROTO", "SOURCE", "DESTINATION", "DETAIL"}); err != nil {
			return err
		}
	}
	f := r.GetFlow()
	return p.columns.write(p.w, []string{
		f.GetTime().AsTime().Format(clock),
		shortName(f.GetType().String(), flowTypePrefix),
		shortName(f.GetVerdict().String(), verdictPrefix),
		f.GetProtocol(), endpointText(f, f.GetSource()), endpointText(f, f.GetDestination()), detail(f),
	})
}

// endpointText is who it is, and the port where there is one.
func endpointText(f *weftv1.Flow, e *weftv1.FlowEndpoint) string {
	who := e.GetIp()
	port := strconv.FormatUint(uint64(e.GetPort()), 10)
	hasPort := e.GetPort() != 0 && !isICMP(f)
	switch {
	case e.GetPod() != "" && hasPort:
		return e.GetNamespace() + "/" + e.GetPod() + ":" + port
	case e.GetPod() != "":
		return e.GetNamespace() + "/" + e.GetPod()
	case hasPort:
		who = net.JoinHostPort(who, port)
	}
	return who + " (" + e.GetKind() + ")"
}

func detail(f *weftv1.Flow) string {
	var parts []string
	if f.GetReason() != "" {
		parts = append(parts, f.GetReason())
	}
	if f.GetPolicy() != "" {
		parts = append(parts, f.GetPolicy())
	}
	if f.GetTcpFlags() != "" {
		parts = append(parts, f.GetTcpFlags())
	}
	if isICMP(f) {
		parts = append(parts, fmt.Sprintf("type %d code %d", f.GetIcmpType(), f.GetIcmpCode()))
	}
	parts = append(parts, plural(f.GetPackets(), "packet")+" "+plural(f.GetBytes(), "byte"))
	if f.GetDevice() != "" {
		parts = append(parts, f.GetDirection()+" "+deviceText(f))
	}
	return strings.Join(parts, " · ")
}

// deviceText names the device, and its pod where neither end of the flow is it:
// a packet with a forged source address.
func deviceText(f *weftv1.Flow) string {
	pod := f.GetDevicePod()
	if pod == "" || pod == podName(f.GetSource()) || pod == podName(f.GetDestination()) {
		return f.GetDevice()
	}
	return f.GetDevice() + " of " + pod
}

func podName(e *weftv1.FlowEndpoint) string { return e.GetNamespace() + "/" + e.GetPod() }

func lostText(l *weftv1.Lost) string {
	text := "--- " + plural(l.GetCount(), "event") + " lost"
	switch l.GetWhere() {
	case whereKernelRing:
		text += fmt.Sprintf(" on CPU %d before the agent could read them", l.GetCpu())
	default:
		text += ": this client was too slow"
	}
	if l.GetFrom() != nil && l.GetTo() != nil {
		text += fmt.Sprintf(" (%s to %s)", l.GetFrom().AsTime().Format(clock), l.GetTo().AsTime().Format(clock))
	}
	return text + " ---"
}

func plural(n uint64, what string) string {
	if n != 1 {
		what += "s"
	}
	return strconv.FormatUint(n, 10) + " " + what
}
