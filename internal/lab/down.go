// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/cgroup"
	"github.com/weft-mesh/weft/internal/lab/api"
	"github.com/weft-mesh/weft/internal/netdev"
)

const (
	// stopTime is how long a daemon has to end its agents in an orderly way.
	stopTime = 20 * time.Second
	// goneTime is how long killed processes may take to be gone.
	goneTime = 20 * time.Second
)

// Down removes a lab and all that it made. It works without the lab's daemon,
// and for a lab that is not there.
func (c *Client) Down(ctx context.Context) error {
	stopCtx, cancel := context.WithTimeout(ctx, stopTime)
	defer cancel()
	resp, err := c.do(stopCtx, http.MethodPost, api.PathStop, nil)
	if err == nil {
		resp.Body.Close()
	}
	// A daemon that could not stop, or is not there, is no reason to leave
	// anything: the rest is removed the hard way.
	return c.remove(ctx)
}

// remove removes a lab, whatever is left of it: everything is found by the lab's
// name in folders, cgroups and names of namespaces, never by the name of a
// process.
func (c *Client) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, goneTime)
	defer cancel()
	return errors.Join(
		c.removeProcesses(ctx),
		c.removePins(),
		c.removeNetNS(),
		c.removeFiles(),
	)
}

func (c *Client) removeProcesses(ctx context.Context) error {
	if err := cgroup.Remove(ctx, c.layout.Cgroup); err != nil {
		return err
	}
	removeEmpty(filepath.Dir(c.layout.Cgroup))
	return nil
}

func (c *Client) removePins() error {
	if err := os.RemoveAll(c.layout.PinDir()); err != nil {
		return fmt.Errorf("remove the pins of the lab: %w", err)
	}
	removeEmpty(filepath.Dir(c.layout.PinDir()))
	return nil
}

func (c *Client) removeNetNS() error {
	names, err := netdev.ListNetNS()
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		if strings.HasPrefix(name, c.layout.NetNSPrefix()) {
			errs = append(errs, netdev.DeleteNetNS(name))
		}
	}
	return errors.Join(errs...)
}

func (c *Client) removeFiles() error {
	dir := c.layout.Dir()
	mounts, err := mountsBelow(dir)
	if err != nil {
		return err
	}
	for _, point := range mounts {
		if err := unix.Unmount(point, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount %s: %w", point, err)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove the folder of the lab: %w", err)
	}
	removeEmpty(c.layout.Root)
	return nil
}

// removeEmpty removes a folder that labs share, once nothing is in it.
func removeEmpty(dir string) { os.Remove(dir) }

// mountsBelow returns the mount points below dir, the last mounted first.
func mountsBelow(dir string) ([]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("read the mounts of this process: %w", err)
	}
	defer f.Close()
	var points []string
	scan := bufio.NewScanner(f)
	for scan.Scan() {
		if fields := strings.Fields(scan.Text()); len(fields) > 4 && strings.HasPrefix(fields[4], dir+"/") {
			points = append(points, fields[4])
		}
	}
	slices.Reverse(points)
	if err := scan.Err(); err != nil {
		return nil, fmt.Errorf("read the mounts of this process: %w", err)
	}
	return points, nil
}
