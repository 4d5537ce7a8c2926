// SPDX-License-Identifier: Apache-2.0

package event_test

import (
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weft-mesh/weft/internal/datapath/event"
	"github.com/weft-mesh/weft/internal/datapath/node"
	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// emitter runs a datapath program that makes one event, a drop, for each packet.
type emitter struct {
	*pt.Node
	prog *ebpf.Program
}

func newEmitter(t *testing.T) emitter {
	t.Helper()
	n := pt.New(t, pt.Sizes())
	d, err := node.Load(n.Maps, n.Settings())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	n.Do(func() error {
		return d.Attach(node.Device{Name: pt.Uplink, Ifindex: n.Ifindex(pt.Uplink)}, &node.Device{Name: pt.Tunnel, Ifindex: n.Ifindex(pt.Tunnel)})
	})
	attached, err := n.Maps.Attachments()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range attached {
		if a.Program == "from_tunnel" {
			prog, err := ebpf.NewProgramFromID(ebpf.ProgramID(a.ProgramID))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { prog.Close() })
			return emitter{n, prog}
		}
	}
	t.Fatalf("from_tunnel is not among %v", attached)
	return emitter{}
}

func (e emitter) emit(t *testing.T, times int) {
	t.Helper()
	f := pt.Families[0]
	p := pt.Packet{EthSrc: pt.MACOther, EthDst: pt.MACNode, Src: f.B, Dst: f.A, TTL: 64, Protocol: pt.TCP, Sport: 1000, Dport: 80, Flags: pt.SYN}
	if err := e.Repeat(e.prog, pt.In{Device: pt.Tunnel, Frame: p.Bytes()}, times); err != nil {
		t.Errorf("run from_tunnel: %v", err)
	}
}

func open(t *testing.T, m *pin.Maps) *event.Ring {
	t.Helper()
	r, err := event.NewRing(m)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

func TestRecord(t *testing.T) {
	e := newEmitter(t)
	ring := open(t, e.Maps)
	before := time.Now()
	e.emit(t, 1)
	var got event.Record
	if err := ring.Read(&got); err != nil {
		t.Fatal(err)
	}
	if d := got.Time.Sub(before); d < -time.Second || d > time.Minute {
		t.Errorf("event of %v, made at %v", got.Time, before)
	}
	want := event.Record{
		Type: event.TypeDrop, Direction: event.DirectionIngress, Reason: "tunnel-forged",
		CPU: got.CPU, Sequence: 0, Time: got.Time, Protocol: 6,
		Source: netip.MustParseAddrPort("10.244.1.6:1000"), Destination: netip.MustParseAddrPort("10.244.1.5:80"),
		SourceIdentity: pt.IdentityB, DestinationIdentity: pt.IdentityA, TCPFlags: pt.SYN,
		Ifindex: uint32(e.Ifindex(pt.Tunnel)), Packets: 1, Bytes: 54,
	}
	if got != want {
		t.Errorf("record\n%+v, want\n%+v", got, want)
	}
	if err := ring.Read(&got); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("an empty ring: %v, want %v", err, os.ErrDeadlineExceeded)
	}
}

// TestOverflow: far more events than the ring holds, with a reader that wakes
// now and then: received and lost together are what was generated, for each CPU,
// and what was received has no number twice.
func TestOverflow(t *testing.T) {
	e := newEmitter(t)
	ring := open(t, e.Maps)
	received := map[uint32]uint64{}
	seen := map[[2]uint64]bool{}
	read := func() {
		var r event.Record
		for {
			err := ring.Read(&r)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			id := [2]uint64{uint64(r.CPU), r.Sequence}
			if seen[id] {
				t.Fatalf("event %d of CPU %d came twice", r.Sequence, r.CPU)
			}
			seen[id] = true
			received[r.CPU]++
		}
	}
	const burst, bursts = 5000, 4
	for range bursts {
		e.emit(t, burst)
		read()
	}
	counters, err := ring.Counters()
	if err != nil {
		t.Fatal(err)
	}
	var generated, lost uint64
	for _, c := range counters {
		if received[c.CPU]+c.Lost != c.Generated {
			t.Errorf("CPU %d: received %d + lost %d is not generated %d", c.CPU, received[c.CPU], c.Lost, c.Generated)
		}
		generated, lost = generated+c.Generated, lost+c.Lost
	}
	if generated != burst*bursts || lost == 0 || len(seen) == 0 {
		t.Errorf("generated %d, want %d; lost %d, received %d: want some", generated, burst*bursts, lost, len(seen))
	}
}

// TestOverflowWhileReading: the same with reader and writers at the same time.
func TestOverflowWhileReading(t *testing.T) {
	e := newEmitter(t)
	ring := open(t, e.Maps)
	const burst, writers = 20000, 2
	done := make(chan struct{})
	go func() {
		defer close(done)
		finished := make(chan struct{}, writers)
		for range writers {
			go func() { e.emit(t, burst); finished <- struct{}{} }()
		}
		for range writers {
			<-finished
		}
	}()
	var received uint64
	for idle := false; ; {
		var r event.Record
		err := ring.Read(&r)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if idle {
				break
			}
			select {
			case <-done:
				idle = true // once more, for what came just before
			default:
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		received++
	}
	counters, err := ring.Counters()
	if err != nil {
		t.Fatal(err)
	}
	var generated, lost uint64
	for _, c := range counters {
		generated, lost = generated+c.Generated, lost+c.Lost
	}
	if received+lost != generated || generated != burst*writers {
		t.Errorf("received %d + lost %d, generated %d, want %d", received, lost, generated, burst*writers)
	}
}

func TestClose(t *testing.T) {
	e := newEmitter(t)
	ring := open(t, e.Maps)
	done := make(chan error, 1)
	go func() {
		var r event.Record
		for {
			if err := ring.Read(&r); !errors.Is(err, os.ErrDeadlineExceeded) {
				done <- err
				return
			}
		}
	}()
	if err := ring.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		if !errors.Is(err, os.ErrClosed) {
			t.Errorf("Read of a closed ring: %v, want %v", err, os.ErrClosed)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("Read goes on after Close")
	}
	if _, err := ring.Counters(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Counters of a closed ring: %v", err)
	}
}
