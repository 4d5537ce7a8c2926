// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"net/netip"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/datapath/event"
)

// maxDevices bounds the cache of device names.
const maxDevices = 4096

// reasonPolicy is the reason of drops that a rule explains.
const reasonPolicy = "policy"

// decoder turns records into flows. Not safe for concurrent use.
type decoder struct {
	node       string
	index      *index
	deviceName func(ifindex uint32) string
	ruleName   func(rule uint32) string // may be nil
	devices    map[uint32]string
	flags      [256]string
}

func newDecoder(node string, x *index, deviceName func(uint32) string, ruleName func(uint32) string) *decoder {
	d := &decoder{node: node, index: x, deviceName: deviceName, ruleName: ruleName, devices: map[uint32]string{}}
	for i := range d.flags {
		d.flags[i] = flagNames(uint8(i))
	}
	return d
}

// item is a flow with all its parts in one allocation.
type item struct {
	response            weftv1.ObserveResponse
	one                 weftv1.ObserveResponse_Flow
	flow                weftv1.Flow
	source, destination weftv1.FlowEndpoint
	time                timestamppb.Timestamp
}

// decode returns a new flow for r, with what the tables know about its ends.
func (d *decoder) decode(r *event.Record) *weftv1.ObserveResponse {
	i := &item{}
	i.response.Item = &i.one
	i.one.Flow = &i.flow
	stamp(&i.time, r.Time)
	d.endpoint(&i.source, r.Source, r.SourceIdentity)
	d.endpoint(&i.destination, r.Destination, r.DestinationIdentity)
	f := &i.flow
	f.Time, f.Source, f.Destination = &i.time, &i.source, &i.destination
	f.Node = d.node
	f.Type = flowType(r.Type)
	f.Verdict = weftv1.Verdict_VERDICT_FORWARDED
	if r.Type == event.TypeDrop {
		f.Verdict, f.Reason = weftv1.Verdict_VERDICT_DROPPED, r.Reason
		if r.Reason == reasonPolicy && d.ruleName != nil {
			f.Policy = d.ruleName(r.Rule)
		}
	}
	f.Direction = directionName(r.Direction)
	f.Protocol = protocolName(r.Protocol)
	if r.Protocol == protocolTCP {
		f.TcpFlags = d.flags[r.TCPFlags]
	}
	f.IcmpType, f.IcmpCode = uint32(r.ICMPType), uint32(r.ICMPCode)
	f.Packets, f.Bytes = r.Packets, r.Bytes
	f.Cpu, f.Sequence = r.CPU, r.Sequence
	f.Device, f.DevicePod = d.device(r.Ifindex)
	return &i.response
}

func (d *decoder) endpoint(to *weftv1.FlowEndpoint, a netip.AddrPort, identity uint64) {
	e := d.index.lookup(a.Addr())
	to.Ip, to.Kind = e.ip, e.kind
	to.Namespace, to.Pod, to.Labels = e.namespace, e.pod, e.labels
	to.Port, to.Identity = uint32(a.Port()), identity
}

// device names a device, and the pod of this node whose it is.
func (d *decoder) device(ifindex uint32) (name, pod string) {
	if ifindex == 0 {
		return "", ""
	}
	if dev, ok := d.index.devices[ifindex]; ok {
		return dev.name, dev.pod
	}
	return d.otherDevice(ifindex), ""
}

func (d *decoder) otherDevice(ifindex uint32) string {
	if name, ok := d.devices[ifindex]; ok {
		return name
	}
	if d.deviceName == nil {
		return ""
	}
	name := d.deviceName(ifindex)
	if len(d.devices) >= maxDevices {
		clear(d.devices)
	}
	d.devices[ifindex] = name
	return name
}

func stamp(to *timestamppb.Timestamp, t time.Time) {
	to.Seconds, to.Nanos = t.Unix(), int32(t.Nanosecond())
}

func flowType(t event.Type) weftv1.FlowType {
	switch t {
	case event.TypeNew:
		return weftv1.FlowType_FLOW_TYPE_NEW
	case event.TypeUpdate:
		return weftv1.FlowType_FLOW_TYPE_UPDATE
	case event.TypeClose:
		return weftv1.FlowType_FLOW_TYPE_CLOSE
	case event.TypeDrop:
		return weftv1.FlowType_FLOW_TYPE_DROP
	}
	return weftv1.FlowType_FLOW_TYPE_UNSPECIFIED
}

func directionName(d event.Direction) string {
	switch d {
	case event.DirectionEgress:
		return "egress"
	case event.DirectionIngress:
		return "ingress"
	}
	return ""
}

// IP protocol numbers that have a name here.
const (
	protocolICMP   = 1
	protocolTCP    = 6
	protocolUDP    = 17
	protocolICMPv6 = 58
)

func protocolName(p uint8) string {
	switch p {
	case protocolICMP:
		return "ICMP"
	case protocolTCP:
		return "TCP"
	case protocolUDP:
		return "UDP"
	case protocolICMPv6:
		return "ICMPv6"
	}
	return strconv.Itoa(int(p))
}

// flagNames lists the TCP flags that are set, lowest bit first.
func flagNames(flags uint8) string {
	var set []string
	for bit, name := range []string{"FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR"} {
		if flags&(1<<bit) != 0 {
			set = append(set, name)
		}
	}
	return strings.Join(set, ",")
}
