// SPDX-License-Identifier: Apache-2.0

// Package bench measures paths between network namespaces: a load generator
// and a server, the baselines to compare with, and runs in which all take turns.
//
// The generator and the server are processes of their own (so that each lives
// in its namespace), of one thread, with plain blocking sockets or epoll: what
// they cost is small and the same for every path.
package bench

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// Mode is the kind of load.
type Mode string

// The kinds of load, named as netperf names them.
const (
	RR     Mode = "rr"     // request and response on open connections
	CRR    Mode = "crr"    // connect, request, response, close; one at a time
	CC     Mode = "cc"     // connect, close; one at a time; the latency is of connect(2) alone
	Stream Mode = "stream" // one connection, as fast as it goes
	// who has a server that answers with the address it was reached at, for probes.
	who Mode = "who"
)

const (
	maxBytes       = 64 << 10
	maxConnections = 4096
	streamChunk    = 128 << 10
	// patience is how long a generator waits for an answer before it counts
	// the request as failed and ends.
	patience = 5 * time.Second
)

// Load is what a generator does.
type Load struct {
	Mode Mode `json:"mode"`
	// Bytes of a request, and of its response. Not of Stream and CC.
	Bytes int `json:"bytes,omitempty"`
	// Connections at once; 1 for CRR, CC and Stream.
	Connections int `json:"connections"`
	// Rate makes it an open loop: so many requests a second over all
	// connections, latency counted from when each was due. 0 is a closed
	// loop: a connection sends its next request when it has the response. Of RR only.
	Rate     float64       `json:"rate,omitempty"`
	Warmup   time.Duration `json:"warmup_ns"` // not measured
	Duration time.Duration `json:"duration_ns"`
	// Same has a CC connect to one service all the time; else each connection
	// goes to another one at random.
	Same bool `json:"same,omitempty"`
}

// Name is short and tells loads of one run apart, such as "rr 200 B × 16".
func (l Load) Name() string {
	switch {
	case l.Mode == Stream:
		return "stream"
	case l.Mode == CC && l.Same:
		return "connect to one"
	case l.Mode == CC:
		return "connect to any"
	case l.Rate > 0:
		return fmt.Sprintf("%s %d B × %d at %g/s", l.Mode, l.Bytes, l.Connections, l.Rate)
	}
	return fmt.Sprintf("%s %d B × %d", l.Mode, l.Bytes, l.Connections)
}

func (l Load) validate() error {
	var errs []error
	if !slices.Contains([]Mode{RR, CRR, CC, Stream, who}, l.Mode) {
		errs = append(errs, fmt.Errorf("mode %q: it is one of rr, crr, cc, stream", l.Mode))
	}
	if (l.Mode == RR || l.Mode == CRR) && (l.Bytes < 1 || l.Bytes > maxBytes) {
		errs = append(errs, fmt.Errorf("%d bytes: 1 to %d", l.Bytes, maxBytes))
	}
	if l.Connections < 1 || l.Connections > maxConnections {
		errs = append(errs, fmt.Errorf("%d connections: 1 to %d", l.Connections, maxConnections))
	}
	if l.Mode != RR && l.Connections > 1 {
		errs = append(errs, fmt.Errorf("%d connections: mode %s has one", l.Connections, l.Mode))
	}
	if l.Rate < 0 || l.Rate > 0 && l.Mode != RR {
		errs = append(errs, fmt.Errorf("rate %g: it is positive, and of mode rr", l.Rate))
	}
	if l.Duration <= 0 || l.Warmup < 0 {
		errs = append(errs, fmt.Errorf("duration %v after a warm-up of %v: positive, and not negative", l.Duration, l.Warmup))
	}
	return errors.Join(errs...)
}

// Latency is a distribution in microseconds.
type Latency struct {
	Mean float64 `json:"mean_us"`
	P50  float64 `json:"p50_us"`
	P99  float64 `json:"p99_us"`
	P999 float64 `json:"p999_us"`
	Max  float64 `json:"max_us"`
	// HDR is the whole histogram, of nanoseconds, in HdrHistogram's V2 encoding.
	HDR string `json:"hdr,omitempty"`
}

// ClientReport is what a generator measured. Requests, Bytes, Latency and the
// processor times are of the measured part, Sent and Answered of all.
type ClientReport struct {
	Seconds  float64    `json:"seconds"`
	Requests uint64     `json:"requests"`
	Bytes    uint64     `json:"bytes"` // payload sent
	Latency  *Latency   `json:"latency,omitempty"`
	Process  float64    `json:"process_cpu_seconds"`
	Machine  MachineCPU `json:"machine_cpu"`
	Sent     uint64     `json:"sent_bytes"`
	Answered uint64     `json:"answered"`
	// Error says why the load ended early.
	Error string `json:"error,omitempty"`
}

// ServerReport is of all that a server did.
type ServerReport struct {
	Requests uint64  `json:"requests"`
	Received uint64  `json:"received_bytes"`
	Process  float64 `json:"process_cpu_seconds"`
	Error    string  `json:"error,omitempty"`
}
