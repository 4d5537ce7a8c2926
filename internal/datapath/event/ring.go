// SPDX-License-Identifier: Apache-2.0

package event

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"time"
	"unsafe"

	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/reason"
)

// pollInterval is how long an event may wait in the ring: the kernel wakes the
// reader only when much has gathered.
const pollInterval = 100 * time.Millisecond

// Ring reads the events of the datapath. It is a Source; Read is for one
// goroutine, Close and Counters for any.
type Ring struct {
	maps   *pin.Maps
	reader *ringbuf.Reader
	record ringbuf.Record
	// offset turns CLOCK_MONOTONIC into wall clock; refreshed on every idle
	// poll, so that a stepped clock is followed.
	offset time.Duration

	mu     sync.Mutex // protects closed
	closed bool
}

// NewRing opens the ring of m. Only one reader may exist at a time.
func NewRing(m *pin.Maps) (*Ring, error) {
	r, err := ringbuf.NewReader(m.Map("weft_events"))
	if err != nil {
		return nil, fmt.Errorf("open the event ring: %w", err)
	}
	ring := &Ring{maps: m, reader: r}
	if err := ring.syncClock(); err != nil {
		r.Close()
		return nil, err
	}
	return ring, nil
}

func (r *Ring) syncClock() error {
	var mono unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &mono); err != nil {
		return fmt.Errorf("read the monotonic clock: %w", err)
	}
	r.offset = time.Duration(time.Now().UnixNano() - mono.Nano())
	return nil
}

// Read fills rec with the next event; see Source.
func (r *Ring) Read(rec *Record) error {
	r.reader.SetDeadline(time.Now().Add(pollInterval))
	err := r.reader.ReadInto(&r.record)
	switch {
	case errors.Is(err, ringbuf.ErrClosed):
		return os.ErrClosed
	case errors.Is(err, os.ErrDeadlineExceeded):
		if err := r.syncClock(); err != nil {
			return err
		}
		return os.ErrDeadlineExceeded
	case err != nil:
		return fmt.Errorf("read the event ring: %w", err)
	}
	return r.decode(rec)
}

func (r *Ring) decode(rec *Record) error {
	if len(r.record.RawSample) < int(unsafe.Sizeof(pin.KernelEvent{})) {
		return fmt.Errorf("event of %d bytes: want %d", len(r.record.RawSample), unsafe.Sizeof(pin.KernelEvent{}))
	}
	e := (*pin.KernelEvent)(unsafe.Pointer(&r.record.RawSample[0]))
	*rec = Record{
		Type:                Type(e.Type),
		Direction:           Direction(e.Direction),
		Reason:              reason.Name(e.Reason),
		CPU:                 e.Cpu,
		Sequence:            e.Sequence,
		Time:                time.Unix(0, int64(e.Time)).Add(r.offset),
		Protocol:            e.Protocol,
		Source:              netip.AddrPortFrom(addr.From16(e.Src.B), hostOrder(e.Sport)),
		Destination:         netip.AddrPortFrom(addr.From16(e.Dst.B), hostOrder(e.Dport)),
		SourceIdentity:      e.SrcIdentity,
		DestinationIdentity: e.DstIdentity,
		Rule:                e.Rule,
		TCPFlags:            e.TcpFlags,
		ICMPType:            e.IcmpType,
		ICMPCode:            e.IcmpCode,
		Ifindex:             e.Ifindex,
		Packets:             e.Packets,
		Bytes:               e.Bytes,
	}
	return nil
}

// hostOrder turns a 16-bit field in network order, read in the machine's order,
// into a number.
func hostOrder(v uint16) uint16 {
	var b [2]byte
	binary.NativeEndian.PutUint16(b[:], v)
	return binary.BigEndian.Uint16(b[:])
}

// Counters reads how many events each CPU made and lost; see Source.
func (r *Ring) Counters() ([]Counters, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, os.ErrClosed
	}
	var perCPU []pin.KernelEventCount
	if err := r.maps.Map("weft_event_counts").Lookup(uint32(0), &perCPU); err != nil {
		return nil, fmt.Errorf("read event counters: %w", err)
	}
	out := make([]Counters, len(perCPU))
	for cpu, c := range perCPU {
		out[cpu] = Counters{CPU: uint32(cpu), Generated: c.Generated, Lost: c.Lost}
	}
	return out, nil
}

// Close ends Read with os.ErrClosed.
func (r *Ring) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	return r.reader.Close()
}
