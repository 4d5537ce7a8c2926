// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/weft-mesh/weft/internal/lab/layout"
	"github.com/weft-mesh/weft/internal/lab/logfile"
	"github.com/weft-mesh/weft/internal/lab/model"
	"github.com/weft-mesh/weft/internal/lab/probe"
	"github.com/weft-mesh/weft/internal/lab/process"
	"github.com/weft-mesh/weft/internal/lab/shim"
)

const (
	restartMin = 200 * time.Millisecond
	restartMax = 30 * time.Second
	// goodRun is how long a container must run for its next restart to be quick.
	goodRun = 30 * time.Second
	// settleTime is how long a container without a readiness probe must run to be
	// ready: one that ends at once never is.
	settleTime = 250 * time.Millisecond
	// afterPreStop is what a container has between SIGTERM and SIGKILL at least,
	// after a preStop hook that took all of the grace period.
	afterPreStop = 2 * time.Second
)

// runContainers runs the init containers one after the other, then all others
// together, and returns when none runs and none is to be restarted.
func (w *worker) runContainers() {
	for i := range w.pod.Spec.InitContainers {
		if !w.keepRunning(&w.pod.Spec.InitContainers[i], true) {
			return
		}
	}
	var wg sync.WaitGroup
	for i := range w.pod.Spec.Containers {
		wg.Go(func() { w.keepRunning(&w.pod.Spec.Containers[i], false) })
	}
	wg.Wait()
}

// containerStatus changes the status of one container.
func (w *worker) containerStatus(name string, init bool, change func(*corev1.ContainerStatus)) {
	w.status(func(st *corev1.PodStatus) {
		list := &st.ContainerStatuses
		if init {
			list = &st.InitContainerStatuses
		}
		change(model.Container(list, name))
	})
}

// keepRunning runs a container as often as its pod's restart policy says. It
// returns whether the last run ended well.
func (w *worker) keepRunning(ct *corev1.Container, init bool) (ok bool) {
	delay := time.Duration(0)
	for w.ctx.Err() == nil {
		began := time.Now()
		code, err := w.runOnce(ct, init)
		text := fmt.Sprintf("exit code %d", code)
		if err != nil {
			text = err.Error()
		}
		if w.ctx.Err() != nil {
			w.ended(ct, init, code, text)
			return false
		}
		if !w.again(code, init) {
			w.ended(ct, init, code, text)
			return code == 0
		}
		if delay = min(2*delay, restartMax); delay == 0 || time.Since(began) > goodRun {
			delay = restartMin
		}
		w.restarting(ct, init, code, text)
		w.lab.progress("pod %s: container %s ended with %s, restarted in %s", w.key, ct.Name, text, delay)
		select {
		case <-w.ctx.Done():
		case <-time.After(delay):
		}
	}
	return false
}

// again tells whether a container that ended with code is restarted.
func (w *worker) again(code int, init bool) bool {
	switch w.pod.Spec.RestartPolicy {
	case corev1.RestartPolicyNever:
		return false
	case corev1.RestartPolicyOnFailure:
		return code != 0
	default:
		return !init || code != 0
	}
}

func (w *worker) ended(ct *corev1.Container, init bool, code int, text string) {
	w.containerStatus(ct.Name, init, func(cs *corev1.ContainerStatus) {
		cs.Ready = init && code == 0
		cs.State = terminated(code, text)
	})
}

func (w *worker) restarting(ct *corev1.Container, init bool, code int, text string) {
	w.containerStatus(ct.Name, init, func(cs *corev1.ContainerStatus) {
		cs.Ready = false
		cs.RestartCount++
		cs.LastTerminationState = terminated(code, text)
		cs.State = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff", Message: "ended with " + text}}
	})
}

func terminated(code int, text string) corev1.ContainerState {
	return corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: int32(code), Message: text}}
}

// runOnce runs a container until it ends, or stops it when the pod is to be
// stopped.
func (w *worker) runOnce(ct *corev1.Container, init bool) (code int, err error) {
	log, err := logfile.Open(w.logPath(ct.Name), logfile.DefaultLimit)
	if err != nil {
		return shim.ExitSetup, err
	}
	defer log.Close()
	p, err := w.start(ct, log)
	if err != nil {
		fmt.Fprintln(log, err)
		return shim.ExitSetup, err
	}
	w.setPid(ct.Name, p.Pid)
	defer w.setPid(ct.Name, 0)
	w.containerStatus(ct.Name, init, func(cs *corev1.ContainerStatus) {
		cs.Image = ct.Image
		cs.State = corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.Now()}}
		cs.Started = new(false)
	})
	ctx, stopProbes := context.WithCancel(w.lab.ctx)
	var probes sync.WaitGroup
	if !init {
		probes.Go(func() { w.probes(ctx, ct, p, log) })
	}
	select {
	case <-p.Done():
	case <-w.ctx.Done():
		w.end(ct, p)
	}
	stopProbes()
	probes.Wait()
	return p.ExitCode(), nil
}

// end stops a container within the grace period of its pod: the preStop hook,
// SIGTERM, SIGKILL.
func (w *worker) end(ct *corev1.Container, p *process.Process) {
	ctx, cancel := w.graceful()
	defer cancel()
	if ct.Lifecycle != nil && ct.Lifecycle.PreStop != nil {
		w.preStop(ctx, ct, p)
		if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < afterPreStop {
			ctx, cancel = context.WithTimeout(w.lab.ctx, afterPreStop)
			defer cancel()
		}
	}
	if err := p.Stop(ctx); err != nil {
		w.lab.log.Warn("stopping a container failed", "pod", w.key, "error", err)
	}
}

// preStop runs the hook of a container that is to be stopped.
func (w *worker) preStop(ctx context.Context, ct *corev1.Container, p *process.Process) {
	h := ct.Lifecycle.PreStop
	if h.Sleep != nil {
		select {
		case <-p.Done():
		case <-ctx.Done():
		case <-time.After(time.Duration(h.Sleep.Seconds) * time.Second):
		}
		return
	}
	t := probe.Target{Weft: w.lab.cfg.Weft, Inside: func() shim.Spec { return w.insideRunning(ct, p.Pid) }}
	if err := probe.Exec(ctx, h.Exec, t); err != nil {
		w.lab.progress("pod %s: container %s: preStop hook: %v", w.key, ct.Name, err)
	}
}

func (w *worker) setPid(container string, pid int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pids[container] = pid
}

func (w *worker) pid(container string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.pids[container]
}

// current is the pod with the status that it has now.
func (w *worker) current() *corev1.Pod {
	w.lab.mu.Lock()
	defer w.lab.mu.Unlock()
	if p := w.lab.cluster.Pod(w.key); p != nil {
		return p.Object.DeepCopy()
	}
	return w.pod
}

func (w *worker) start(ct *corev1.Container, log *logfile.Writer) (*process.Process, error) {
	env, err := w.env(ct)
	if err != nil {
		return nil, err
	}
	spec := w.inside(ct.Name)
	spec.Binds = []shim.Bind{
		{From: filepath.Join(w.dir(), "hosts"), To: "/etc/hosts"},
		{From: filepath.Join(w.dir(), "resolv.conf"), To: "/etc/resolv.conf"},
	}
	spec.Dir, spec.Env, spec.Argv = ct.WorkingDir, env, model.Argv(ct, env)
	return process.Start(process.Config{Weft: w.lab.cfg.Weft, Spec: spec, Cgroup: w.cgroup(ct.Name), Log: log})
}

// env is the whole environment of a container.
func (w *worker) env(ct *corev1.Container) ([]string, error) {
	own, err := model.Environment(w.current(), ct)
	if err != nil {
		return nil, err
	}
	return mergeEnv([]string{"PATH=" + w.lab.path(), "HOME=/root", "HOSTNAME=" + w.hostname(), layout.EnvCluster + "=" + w.lab.layout.ClusterDir()}, own), nil
}

// mergeEnv lays over on top of base; each variable is there once.
func mergeEnv(base, over []string) []string {
	var env []string
	at := map[string]int{}
	for _, kv := range slices.Concat(base, over) {
		key, _, _ := strings.Cut(kv, "=")
		if i, ok := at[key]; ok {
			env[i] = kv
			continue
		}
		at[key] = len(env)
		env = append(env, kv)
	}
	return env
}

// probes asks the container how it is as long as ctx lasts: whether it is ready
// also while the pod terminates, whether it lives only before that.
func (w *worker) probes(ctx context.Context, ct *corev1.Container, p *process.Process, log *logfile.Writer) {
	t := probe.Target{
		Weft: w.lab.cfg.Weft, NodeNetNS: w.node.netnsPath(), IP: w.ips[0].String(), Container: ct,
		Inside: func() shim.Spec { return w.insideRunning(ct, p.Pid) },
	}
	if ct.StartupProbe != nil && !w.startup(w.ctx, ct, t, p, log) {
		return
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	if ct.LivenessProbe != nil {
		wg.Go(func() {
			alive, cancel := context.WithCancel(w.ctx)
			defer cancel()
			defer context.AfterFunc(ctx, cancel)()
			if why := probe.Failing(alive, ct.LivenessProbe, t); why != "" {
				fmt.Fprintf(log, "weft lab: restarted by its liveness probe: %s\n", why)
				w.lab.progress("pod %s: container %s fails its liveness probe: %s", w.key, ct.Name, why)
				grace, cancel := context.WithTimeout(w.lab.ctx, time.Duration(*w.pod.Spec.TerminationGracePeriodSeconds)*time.Second)
				defer cancel()
				if err := p.Stop(grace); err != nil {
					w.lab.log.Warn("stopping a container failed", "pod", w.key, "error", err)
				}
			}
		})
	}
	if ct.ReadinessProbe == nil {
		select {
		case <-w.ctx.Done():
		case <-p.Done():
		case <-time.After(settleTime):
			w.ready(ctx, ct, true, "")
		}
		return
	}
	probe.Watch(ctx, ct.ReadinessProbe, t, func(ok bool, why string) { w.ready(ctx, ct, ok, why) })
}

// startup waits for the first good answer of a startup probe, and kills the
// container if there is none in time.
func (w *worker) startup(ctx context.Context, ct *corev1.Container, t probe.Target, p *process.Process, log *logfile.Writer) bool {
	limit := time.Duration(max(ct.StartupProbe.FailureThreshold, 3)) * time.Duration(max(ct.StartupProbe.PeriodSeconds, 10)) * time.Second
	once, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	started, last := false, ""
	probe.Watch(once, ct.StartupProbe, t, func(ok bool, why string) {
		last = why
		if ok {
			started = true
			cancel()
		}
	})
	if !started && ctx.Err() == nil {
		fmt.Fprintf(log, "weft lab: restarted by its startup probe: %s\n", last)
		if err := p.Kill(); err != nil {
			w.lab.log.Warn("killing a container failed", "pod", w.key, "error", err)
		}
	}
	return started
}

func (w *worker) ready(ctx context.Context, ct *corev1.Container, ok bool, why string) {
	if ctx.Err() != nil {
		return
	}
	w.status(func(st *corev1.PodStatus) {
		cs := model.Container(&st.ContainerStatuses, ct.Name)
		cs.Ready = ok
		*cs.Started = true
		st.Message = why
	})
	if ok {
		w.lab.progress("pod %s: container %s ready", w.key, ct.Name)
	}
}

// insideRunning is how to run something beside the running process of a
// container.
func (w *worker) insideRunning(ct *corev1.Container, pid int) shim.Spec {
	spec := w.inside(ct.Name)
	spec.MountNS = fmt.Sprintf("/proc/%d/ns/mnt", pid)
	spec.Dir = ct.WorkingDir
	if env, err := w.env(ct); err == nil {
		spec.Env = env
	}
	return spec
}
