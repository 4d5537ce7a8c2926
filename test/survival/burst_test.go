// SPDX-License-Identifier: Apache-2.0

package survival

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/weft-mesh/weft/test/testlab"
)

const (
	// burst is how many packets with a wrong source are sent, each an event of
	// 144 bytes, through a ring of 256 KiB.
	burst     = 300_000
	smallRing = "flow: {ringBytes: 262144, reportInterval: \"0s\"}\n"
	quietTime = time.Second // without an event: all have been made
)

// observation counts what a `weft observe --follow -o json` prints.
type observation struct {
	cmd  *exec.Cmd
	done chan error

	mu       sync.Mutex
	received uint64            // protected by mu
	lost     map[string]uint64 // protected by mu; by place
}

func observe(t *testing.T, l *testlab.Lab, node string) *observation {
	t.Helper()
	o := &observation{lost: map[string]uint64{}, done: make(chan error, 1)}
	o.cmd = l.Command(context.Background(), testlab.OnNode(node, "weft", "observe", "--follow", "-o", "json")...)
	out, err := o.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := o.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { o.done <- o.count(out) }()
	return o
}

func (o *observation) count(r io.Reader) error {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		var item struct {
			Flow *struct{}
			Lost *struct {
				Count uint64
				Where string
			}
		}
		if err := json.Unmarshal(lines.Bytes(), &item); err != nil {
			return fmt.Errorf("read %q: %w", lines.Text(), err)
		}
		o.mu.Lock()
		if item.Lost != nil {
			o.lost[item.Lost.Where] += item.Lost.Count
		} else {
			o.received++
		}
		o.mu.Unlock()
	}
	return lines.Err()
}

// sum is received and reported lost, and both in words.
func (o *observation) sum() (uint64, string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	sum := o.received
	for _, n := range o.lost {
		sum += n
	}
	return sum, fmt.Sprintf("%d received, lost %v", o.received, o.lost)
}

// stop ends the observation; an agent that was killed has ended it already.
func (o *observation) stop(t *testing.T) {
	t.Helper()
	_ = o.cmd.Process.Signal(os.Interrupt) // or it has ended
	if err := <-o.done; err != nil {
		t.Error(err)
	}
	_ = o.cmd.Wait() // ends by a signal, or with the agent
}

// burstLab has a node whose agent has the smallest ring, and a pod.
func burstLab(t *testing.T) *testlab.Lab {
	t.Helper()
	l := testlab.New(t)
	config := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(config, []byte(smallRing), 0o644); err != nil {
		t.Fatal(err)
	}
	l.Up(t, pod("sender", "node1", "sleep, infinity"), "--nodes", "1", "--agent-config", config)
	return l
}

// send starts the burst.
func send(t *testing.T, l *testlab.Lab, count int) *exec.Cmd {
	t.Helper()
	cmd := l.Command(t.Context(), testlab.InPod("default/sender", "weft", "send-spoofed",
		"--source", "10.244.77.7", "--to", "172.30.0.254:7", "--count", fmt.Sprint(count))...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd
}

// receives waits until the client has received, or been told of, that many.
func receives(t *testing.T, o *observation, count uint64) {
	t.Helper()
	await(t, waitTime, func() error {
		if sum, words := o.sum(); sum < count {
			return fmt.Errorf("only %s", words)
		}
		return nil
	})
}

// generated is the kernel's own count, once no more events come.
func generated(t *testing.T, l *testlab.Lab) testlab.Events {
	t.Helper()
	var last testlab.Events
	var since time.Time
	await(t, waitTime, func() error {
		st, err := l.Agent(t.Context(), "node1")
		if err != nil {
			return err
		}
		if st.Events != last {
			last, since = st.Events, time.Now()
		}
		if last.Generated == 0 || time.Since(since) < quietTime {
			return fmt.Errorf("events are still being made: %+v", last)
		}
		return nil
	})
	return last
}

// TestBurst: events come faster than anybody reads, as the agent stands still for
// a part of the burst. What a client receives and what it is told that it did not
// is what the kernel has made, to the last one.
func TestBurst(t *testing.T) {
	l := burstLab(t)
	o := observe(t, l, "node1")
	defer o.stop(t)
	agent := agentPid(t, l, "node1")
	if err := send(t, l, 1).Wait(); err != nil {
		t.Fatal(err)
	}
	receives(t, o, 1)
	sender := send(t, l, burst-1)
	receives(t, o, burst/10)
	if err := syscall.Kill(agent, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	waited := sender.Wait()
	if err := syscall.Kill(agent, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if waited != nil {
		t.Fatal(waited)
	}
	events := generated(t, l)
	await(t, waitTime, func() error {
		sum, words := o.sum()
		if sum != events.Generated {
			return fmt.Errorf("%s: %d, the kernel has made %d (%+v)", words, sum, events.Generated, events)
		}
		return nil
	})
	_, words := o.sum()
	t.Logf("%s; the kernel has made %d, %d found no room", words, events.Generated, events.Lost)
	if events.Lost == 0 || events.Generated < burst {
		t.Errorf("%d events, %d lost: the ring did not overflow", events.Generated, events.Lost)
	}
	if events.Received+events.ReportedLost != events.Generated {
		t.Errorf("the agent has received %d and reported %d, of %d", events.Received, events.ReportedLost, events.Generated)
	}
	st, err := l.Agent(t.Context(), "node1")
	if err != nil {
		t.Fatal(err)
	}
	if len(st.Drops) != 1 || st.Drops[0].Name != "spoofed-address" || st.Drops[0].Packets != burst {
		t.Errorf("drops are %v, want %d packets with a wrong source", st.Drops, burst)
	}
}

// TestBurstKill: the agent is killed in the middle of the burst. The next one
// begins where the last has saved that it was, and owns up to all that follows.
func TestBurstKill(t *testing.T) {
	l := burstLab(t)
	first := observe(t, l, "node1")
	defer first.stop(t)
	sender := send(t, l, burst)
	receives(t, first, burst/10)
	l.Must(t, "lab", "agent", "kill", "node1")
	saved := acknowledged(t, l)
	l.Must(t, "lab", "agent", "start", "node1")
	second := observe(t, l, "node1")
	defer second.stop(t)
	if err := sender.Wait(); err != nil {
		t.Fatal(err)
	}
	events := generated(t, l)
	await(t, waitTime, func() error {
		if sum := saved + events.Received + events.ReportedLost; sum != events.Generated {
			events = generated(t, l)
			return fmt.Errorf("%d before the kill and now %d received, %d reported as lost: %d, the kernel has made %d",
				saved, events.Received, events.ReportedLost, sum, events.Generated)
		}
		return nil
	})
	if events.Generated < burst {
		t.Errorf("the kernel has made %d events, want at least %d", events.Generated, burst)
	}
	_, words := second.sum()
	t.Logf("%d before the kill, then %d received and %d reported as lost; the kernel has made %d. The client of the second agent: %s",
		saved, events.Received, events.ReportedLost, events.Generated, words)
}

// acknowledged is how many events the agent has accounted for, as it saved last.
func acknowledged(t *testing.T, l *testlab.Lab) (sum uint64) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(l.Dir(), "nodes", "node1", "events.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0 // killed before it saved anything
	}
	if err != nil {
		t.Fatal(err)
	}
	var next map[string]uint64
	if err := json.Unmarshal(b, &next); err != nil {
		t.Fatal(err)
	}
	for _, n := range next {
		sum += n
	}
	return sum
}
