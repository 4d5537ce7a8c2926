// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// userHz is the unit of /proc/stat: ticks a second, the same on every
// architecture that Go knows.
const userHz = 100

// MachineCPU is what all processors together spent, in seconds, as /proc/stat
// says. Idle is exact to a tick; the split of the busy time is sampled.
type MachineCPU struct {
	User    float64 `json:"user"`
	Nice    float64 `json:"nice"`
	System  float64 `json:"system"`
	Idle    float64 `json:"idle"` // with waiting for disks
	Irq     float64 `json:"irq"`
	Softirq float64 `json:"softirq"`
	Steal   float64 `json:"steal"`
}

func readMachineCPU() (MachineCPU, error) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return MachineCPU{}, err
	}
	return parseMachineCPU(b)
}

func parseMachineCPU(stat []byte) (MachineCPU, error) {
	line, _, _ := bytes.Cut(stat, []byte("\n"))
	fields := strings.Fields(string(line))
	if len(fields) < 9 || fields[0] != "cpu" {
		return MachineCPU{}, fmt.Errorf("/proc/stat: first line is %q", line)
	}
	var v [8]float64
	for i := range v {
		ticks, err := strconv.ParseUint(fields[i+1], 10, 64)
		if err != nil {
			return MachineCPU{}, fmt.Errorf("/proc/stat: field %d: %w", i+1, err)
		}
		v[i] = float64(ticks) / userHz
	}
	return MachineCPU{User: v[0], Nice: v[1], System: v[2], Idle: v[3] + v[4], Irq: v[5], Softirq: v[6], Steal: v[7]}, nil
}

func (m MachineCPU) minus(o MachineCPU) MachineCPU {
	return MachineCPU{
		User: m.User - o.User, Nice: m.Nice - o.Nice, System: m.System - o.System,
		Idle: m.Idle - o.Idle, Irq: m.Irq - o.Irq, Softirq: m.Softirq - o.Softirq, Steal: m.Steal - o.Steal,
	}
}

// busy returns the seconds that the processors worked within wall time: what
// was neither idle nor taken by the hypervisor. It comes from the exact idle
// time, so it holds user, system, irq and softirq without their sampling error.
func (m MachineCPU) busy(wall time.Duration, cpus int) float64 {
	return max(0, wall.Seconds()*float64(cpus)-m.Idle-m.Steal)
}

// usage is one reading of the clocks that a measurement begins and ends with.
type usage struct {
	at      time.Time
	machine MachineCPU
	process time.Duration // user and system time of this process
}

func readUsage() (usage, error) {
	machine, err := readMachineCPU()
	if err != nil {
		return usage{}, err
	}
	process, err := processCPU()
	return usage{at: time.Now(), machine: machine, process: process}, err
}

func processCPU() (time.Duration, error) {
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
		return 0, fmt.Errorf("getrusage: %w", err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano()), nil
}

// calibrate returns the busy seconds per second of a machine that is left
// alone for d.
func calibrate(ctx context.Context, d time.Duration, cpus int) (float64, error) {
	before, err := readUsage()
	if err != nil {
		return 0, err
	}
	select {
	case <-ctx.Done():
		return 0, ctx.Err()
	case <-time.After(d):
	}
	after, err := readUsage()
	if err != nil {
		return 0, err
	}
	wall := after.at.Sub(before.at)
	return after.machine.minus(before.machine).busy(wall, cpus) / wall.Seconds(), nil
}

// cgroupCPU returns the processor seconds that a cgroup (version 2) has used
// since it was made.
func cgroupCPU(dir string) (float64, error) {
	f, err := os.Open(filepath.Join(dir, "cpu.stat"))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if v, ok := strings.CutPrefix(lines.Text(), "usage_usec "); ok {
			usec, err := strconv.ParseUint(v, 10, 64)
			if err != nil {
				return 0, fmt.Errorf("%s: usage_usec: %w", f.Name(), err)
			}
			return float64(usec) / 1e6, nil
		}
	}
	if err := lines.Err(); err != nil {
		return 0, err
	}
	return 0, fmt.Errorf("%s has no usage_usec", f.Name())
}
