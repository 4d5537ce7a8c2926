// SPDX-License-Identifier: Apache-2.0

package netpolapi

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/remotecommand"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"

	"github.com/weft-mesh/weft/internal/serve/prober"
	"github.com/weft-mesh/weft/test/proberlab"
)

// streamTime is how long a client has to open its streams.
const streamTime = 10 * time.Second

// execServer does what the conformance tests want of `kubectl exec`: it takes
// the command "/agnhost connect" and has the prober of that pod do it.
type execServer struct {
	lab  *proberlab.Lab
	http *httptest.Server

	mu    sync.Mutex
	pokes map[string]int // protected by mu; by protocol
}

func newExecServer(l *proberlab.Lab) *execServer {
	s := &execServer{lab: l, pokes: map[string]int{}}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /api/v1/namespaces/{namespace}/pods/{pod}/exec", s.exec)
	s.http = httptest.NewServer(mux)
	return s
}

func (s *execServer) exec(w http.ResponseWriter, r *http.Request) {
	// An order that was given is carried out: its prober has no other connection.
	stderr := s.connect(context.WithoutCancel(r.Context()), r.PathValue("namespace")+"/"+r.PathValue("pod"), r.URL.Query()["command"])
	if _, err := httpstream.Handshake(r, w, []string{remotecommand.StreamProtocolV4Name}); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	streams := make(chan httpstream.Stream, 3)
	conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(stream httpstream.Stream, _ <-chan struct{}) error {
		streams <- stream
		return nil
	})
	if conn == nil {
		return // the upgrader has answered
	}
	defer conn.Close()
	timeout := time.After(streamTime)
	var opened []httpstream.Stream
	for range 3 { // error, stdout, stderr
		select {
		case stream := <-streams:
			opened = append(opened, stream)
			if stream.Headers().Get(corev1.StreamType) == corev1.StreamTypeStderr {
				fmt.Fprint(stream, stderr) // a client that has gone needs no answer
			}
		case <-timeout:
			return
		}
	}
	for _, stream := range opened {
		stream.Close()
	}
	// The client closes when it has read everything.
	select {
	case <-conn.CloseChan():
	case <-timeout:
	}
}

// connect is "/agnhost connect --timeout=D --protocol=P IP:PORT": it returns
// what that prints to standard error, nothing if it connects.
func (s *execServer) connect(ctx context.Context, pod string, command []string) string {
	job, timeout, err := parseConnect(command)
	if err != nil {
		return "OTHER: " + err.Error() + "\n"
	}
	s.mu.Lock()
	s.pokes[job.Protocol]++
	s.mu.Unlock()
	verdicts, err := s.lab.Probe(ctx, map[string][]prober.Job{pod: {job}}, timeout, 1)
	if err != nil {
		return "OTHER: " + err.Error() + "\n"
	}
	switch v := verdicts[pod][0]; v.Outcome {
	case prober.Reached:
		return ""
	case prober.NoAnswer:
		return "TIMEOUT\n"
	case prober.Refused:
		return "REFUSED\n"
	default:
		return "OTHER: " + v.String() + "\n"
	}
}

func parseConnect(command []string) (job prober.Job, timeout time.Duration, err error) {
	if len(command) < 3 || command[0] != "/agnhost" || command[1] != "connect" {
		return job, 0, fmt.Errorf("command %q: want /agnhost connect", command)
	}
	for _, word := range command[2:] {
		name, value, _ := strings.Cut(word, "=")
		switch name {
		case "--timeout":
			timeout, err = time.ParseDuration(value)
		case "--protocol":
			job.Protocol = strings.ToUpper(value)
		default:
			job.To, err = netip.ParseAddrPort(word)
		}
		if err != nil {
			return job, 0, fmt.Errorf("command %q: %w", command, err)
		}
	}
	return job, timeout, nil
}
