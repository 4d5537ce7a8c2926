// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/weft-mesh/weft/internal/cgroup"
	"github.com/weft-mesh/weft/internal/lab/model"
	"github.com/weft-mesh/weft/internal/lab/node"
	"github.com/weft-mesh/weft/internal/lab/sandbox"
	"github.com/weft-mesh/weft/internal/lab/shim"
	"github.com/weft-mesh/weft/internal/netdev"
)

const (
	cniTime    = 30 * time.Second // of one CNI call
	retryMin   = 200 * time.Millisecond
	retryMax   = 10 * time.Second
	removeTime = 10 * time.Second // for the processes of a killed cgroup to be gone
)

// worker makes one pod, keeps its containers running, and takes it away. Only
// its own goroutines change what it made.
type worker struct {
	lab   *Lab
	node  *labNode
	pod   *corev1.Pod // as it was scheduled; immutable
	key   string      // NAMESPACE/NAME
	id    string      // of the sandbox
	netns string      // name; empty for a host-network pod

	ctx    context.Context // ends when the pod is to be stopped
	cancel context.CancelFunc

	mu    sync.Mutex
	ips   []netip.Addr   // protected by mu
	pids  map[string]int // protected by mu; of running containers by name
	until time.Time      // protected by mu; when the grace period ends

	resolvMu sync.Mutex // held while resolv.conf is written
}

// newWorker prepares a worker; the caller holds l.mu.
func newWorker(l *Lab, pod *corev1.Pod) *worker {
	ctx, cancel := context.WithCancel(l.ctx)
	w := &worker{
		lab: l, node: l.node(pod.Spec.NodeName), pod: pod,
		key: pod.Namespace + "/" + pod.Name, id: randomHex(32),
		ctx: ctx, cancel: cancel, pids: map[string]int{},
	}
	if !pod.Spec.HostNetwork {
		w.netns = l.reserveNetNS(pod.Namespace, pod.Name)
	}
	return w
}

// stop has the pod ended within its grace period.
func (w *worker) stop() {
	w.mu.Lock()
	w.until = time.Now().Add(time.Duration(*w.pod.Spec.TerminationGracePeriodSeconds) * time.Second)
	w.mu.Unlock()
	w.cancel()
}

// graceful is the time in which a stopped pod may end by itself.
func (w *worker) graceful() (context.Context, context.CancelFunc) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return context.WithDeadline(w.lab.ctx, w.until)
}

func (w *worker) status(change func(*corev1.PodStatus)) {
	w.lab.update(func(c *model.Cluster) {
		c.SetStatus(w.key, func(st *corev1.PodStatus) {
			change(st)
			model.Summarize(&w.pod.Spec, st)
		})
	})
}

// message is shown as the reason why the pod is not ready; "" for none.
func (w *worker) message(text string) {
	w.status(func(st *corev1.PodStatus) { st.Message = text })
}

// run is the life of the pod. The agents find it in the cluster folder from
// generation on.
func (w *worker) run(generation uint64) {
	if w.prepare(generation) {
		w.runContainers()
	}
	<-w.ctx.Done()
	if w.lab.ctx.Err() != nil {
		return // the whole lab goes
	}
	if w.retry(w.lab.ctx, "removing the pod", w.teardown) {
		w.lab.gone(w)
	}
}

// retry calls f until it succeeds or ctx ends.
func (w *worker) retry(ctx context.Context, what string, f func(context.Context) error) bool {
	for delay := retryMin; ; delay = min(2*delay, retryMax) {
		err := f(ctx)
		if err == nil {
			return true
		}
		if ctx.Err() != nil {
			return false
		}
		w.lab.log.Warn("a step of a pod failed and is repeated", "pod", w.key, "step", what, "error", err)
		w.message(what + ": " + err.Error())
		select {
		case <-ctx.Done():
			return false
		case <-time.After(delay):
		}
	}
}

// prepare makes the sandbox, if need be with several attempts.
func (w *worker) prepare(generation uint64) bool {
	if w.pod.Spec.HostNetwork {
		w.setIPs(w.node.IPs)
	} else {
		// Known to its agent first: then the pod's first packet has its labels.
		known := func(ctx context.Context) error {
			_, err := w.node.agent.WaitApplied(ctx, generation)
			if errors.Is(err, node.ErrStopped) {
				return fmt.Errorf("%s: %w", w.node.Name, err)
			}
			return err
		}
		if !w.retry(w.ctx, "telling the agent", known) || !w.retry(w.ctx, "wiring the pod", w.wire) {
			return false
		}
	}
	if !w.retry(w.ctx, "making the pod's files", w.files) {
		return false
	}
	w.status(func(st *corev1.PodStatus) {
		st.Message = ""
		st.PodIPs = nil
		for _, ip := range w.ips {
			st.PodIPs = append(st.PodIPs, corev1.PodIP{IP: ip.String()})
		}
		st.PodIP = st.PodIPs[0].IP
	})
	w.lab.progress("pod %s: on %s, %s", w.key, w.node.Name, join(w.ips))
	return true
}

func join(ips []netip.Addr) string {
	text := make([]string, len(ips))
	for i, ip := range ips {
		text[i] = ip.String()
	}
	return strings.Join(text, " ")
}

// wire makes the network namespace and calls the CNI plugin. A failed attempt
// leaves nothing behind.
func (w *worker) wire(ctx context.Context) (err error) {
	if err := netdev.CreateNetNS(w.netns); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.unwire(w.lab.ctx))
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, cniTime)
	defer cancel()
	ips, err := w.node.cni.Add(ctx, w.sandbox())
	if err != nil {
		return err
	}
	w.setIPs(ips)
	return nil
}

func (w *worker) setIPs(ips []netip.Addr) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ips = ips
}

// wired tells whether the pod has its addresses.
func (w *worker) wired() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.ips) > 0
}

func (w *worker) unwire(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, cniTime)
	defer cancel()
	return errors.Join(w.node.cni.Del(ctx, w.sandbox()), netdev.DeleteNetNS(w.netns))
}

func (w *worker) sandbox() sandbox.Pod {
	return sandbox.Pod{
		ID: w.id, NetNS: netdev.NetNSPath(w.netns),
		Namespace: w.pod.Namespace, Name: w.pod.Name, UID: string(w.pod.UID),
	}
}

func (w *worker) dir() string { return w.lab.layout.PodDir(w.pod.Namespace, w.pod.Name) }

func (w *worker) nsDir() string { return filepath.Join(w.dir(), "ns") }

func (w *worker) logPath(container string) string {
	return filepath.Join(w.dir(), container+".log")
}

func (w *worker) cgroup(container string) string {
	return filepath.Join(w.lab.layout.PodCgroup(w.node.Name, w.pod.Namespace, w.pod.Name), container)
}

func (w *worker) hostname() string {
	switch {
	case w.pod.Spec.HostNetwork:
		return w.node.Name
	case w.pod.Spec.Hostname != "":
		return w.pod.Spec.Hostname
	}
	return w.pod.Name
}

// files makes the pod's folder with hosts and resolv.conf, and the namespaces
// that its containers share beside the network's.
func (w *worker) files(context.Context) error {
	if err := os.MkdirAll(w.dir(), 0o755); err != nil {
		return fmt.Errorf("make the folder of the pod: %w", err)
	}
	if err := os.WriteFile(filepath.Join(w.dir(), "hosts"), []byte(w.hosts()), 0o644); err != nil {
		return fmt.Errorf("write the pod's hosts: %w", err)
	}
	if err := w.writeResolvConf(true); err != nil {
		return err
	}
	return sandbox.Share(w.nsDir(), w.hostname())
}

func (w *worker) hosts() string {
	var b strings.Builder
	b.WriteString("# Written by weft lab.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n")
	for _, ip := range w.ips {
		if s := w.pod.Spec.Subdomain; s != "" && !w.pod.Spec.HostNetwork {
			fmt.Fprintf(&b, "%s\t%s.%s.%s.svc.%s\t%s\n", ip, w.hostname(), s, w.pod.Namespace, clusterDomain, w.hostname())
			continue
		}
		fmt.Fprintf(&b, "%s\t%s\n", ip, w.hostname())
	}
	for _, a := range w.pod.Spec.HostAliases {
		fmt.Fprintf(&b, "%s\t%s\n", a.IP, strings.Join(a.Hostnames, " "))
	}
	return b.String()
}

// teardown takes everything of the pod away; it may be repeated.
func (w *worker) teardown(ctx context.Context) error {
	removeCtx, cancel := context.WithTimeout(ctx, removeTime)
	defer cancel()
	if err := cgroup.Remove(removeCtx, w.lab.layout.PodCgroup(w.node.Name, w.pod.Namespace, w.pod.Name)); err != nil {
		return err
	}
	if w.netns != "" {
		if err := w.unwire(ctx); err != nil {
			return err
		}
	}
	if err := sandbox.Unshare(w.nsDir()); err != nil {
		return err
	}
	if err := os.RemoveAll(w.dir()); err != nil {
		return fmt.Errorf("remove the folder of the pod: %w", err)
	}
	return nil
}

// inside is how to run something in the pod, in a namespace of mounts that the
// caller chooses.
func (w *worker) inside(container string) shim.Spec {
	s := shim.Spec{
		Cgroup: w.cgroup(container),
		NetNS:  w.node.netnsPath(),
		UTSNS:  filepath.Join(w.nsDir(), "uts"),
		IPCNS:  filepath.Join(w.nsDir(), "ipc"),
	}
	if w.netns != "" {
		s.NetNS = netdev.NetNSPath(w.netns)
	}
	return s
}
