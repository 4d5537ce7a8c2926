// SPDX-License-Identifier: Apache-2.0

// Package layout says where everything of a lab is: files, sockets, cgroups,
// pins and the names of network namespaces. All of them carry the lab's name,
// so that two labs never meet and a lab can be removed by its name alone.
package layout

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	"github.com/weft-mesh/weft/internal/cgroup"
)

// Names of environment variables.
const (
	EnvDir = "WEFT_LAB_DIR" // folder of all labs instead of DefaultDir
	EnvLab = "WEFT_LAB"     // the lab that commands mean by default
	// EnvCluster tells containers where ClusterDir is, to be read only.
	EnvCluster = "WEFT_CLUSTER_DIR"
)

// DefaultDir holds a folder for each lab.
const DefaultDir = "/run/weft-lab"

// Outside names the underlay's own namespace in `weft lab node exec`.
const Outside = "outside"

// pinRoot is where the pins of all labs are, on bpffs.
const pinRoot = "/sys/fs/bpf/weft"

// A name has no dash: "weft-a-b-underlay" would belong to two labs.
var validName = regexp.MustCompile(`^[a-z0-9]{1,16}$`)

// Layout is one lab's. It only computes names.
type Layout struct {
	Name   string
	Root   string // folder of all labs
	Cgroup string // folder of the lab in cgroup2
}

// New returns the layout of the lab called name.
func New(name string) (Layout, error) {
	if !validName.MatchString(name) {
		return Layout{}, fmt.Errorf("lab name %q: want 1 to 16 lower-case letters and digits", name)
	}
	mount, err := cgroup.Mount()
	if err != nil {
		return Layout{}, err
	}
	root := os.Getenv(EnvDir)
	if root == "" {
		root = DefaultDir
	}
	return Layout{Name: name, Root: root, Cgroup: filepath.Join(mount, "weft-lab", name)}, nil
}

// Dir is the lab's folder.
func (l Layout) Dir() string { return filepath.Join(l.Root, l.Name) }

// Socket is where the lab's daemon listens.
func (l Layout) Socket() string { return filepath.Join(l.Dir(), "lab.sock") }

// DaemonLog is the log of the lab's daemon.
func (l Layout) DaemonLog() string { return filepath.Join(l.Dir(), "lab.log") }

// ClusterDir is the folder of manifests that the agents read.
func (l Layout) ClusterDir() string { return filepath.Join(l.Dir(), "cluster") }

// TmpDir is beside ClusterDir, on the same file system.
func (l Layout) TmpDir() string { return filepath.Join(l.Dir(), "tmp") }

// NodeDir is the run folder of a node's agent.
func (l Layout) NodeDir(node string) string { return filepath.Join(l.Dir(), "nodes", node) }

// NodeSocket is where a node's agent listens.
func (l Layout) NodeSocket(node string) string { return filepath.Join(l.NodeDir(node), "weft.sock") }

// AgentLog is the log of a node's agent.
func (l Layout) AgentLog(node string) string { return filepath.Join(l.Dir(), "nodes", node+".log") }

// AgentConfig is the configuration of a node's agent.
func (l Layout) AgentConfig(node string) string {
	return filepath.Join(l.Dir(), "nodes", node+".yaml")
}

// PodDir is the folder of a pod: hosts, resolv.conf and a log for each container.
func (l Layout) PodDir(namespace, name string) string {
	return filepath.Join(l.Dir(), "pods", namespace+"_"+name)
}

// NetNSPrefix begins the names of all network namespaces of the lab.
func (l Layout) NetNSPrefix() string { return "weft-" + l.Name + "-" }

// UnderlayNetNS is the namespace of the bridge that joins the nodes.
func (l Layout) UnderlayNetNS() string { return l.NetNSPrefix() + "underlay" }

// NodeNetNS is the namespace of a node.
func (l Layout) NodeNetNS(node string) string { return l.NetNSPrefix() + node }

// PodNetNS is the namespace of a pod. A pod with the namespace "a-b" and the
// name "c" and one with "a" and "b-c" have the same: the second one gets more.
func (l Layout) PodNetNS(namespace, name string) string {
	return l.NetNSPrefix() + "pod-" + namespace + "-" + name
}

// DaemonCgroup holds the lab's daemon.
func (l Layout) DaemonCgroup() string { return filepath.Join(l.Cgroup, "daemon") }

// NodeCgroup holds everything of a node.
func (l Layout) NodeCgroup(node string) string { return filepath.Join(l.Cgroup, node) }

// AgentCgroup holds a node's agent.
func (l Layout) AgentCgroup(node string) string { return filepath.Join(l.NodeCgroup(node), "agent") }

// HostCgroup holds what `weft lab node exec` runs.
func (l Layout) HostCgroup(node string) string { return filepath.Join(l.NodeCgroup(node), "host") }

// PodCgroup holds a folder for each container of a pod.
func (l Layout) PodCgroup(node, namespace, name string) string {
	return filepath.Join(l.NodeCgroup(node), "pods", namespace+"_"+name)
}

// PinDir holds the pins of all agents of the lab.
func (l Layout) PinDir() string { return filepath.Join(pinRoot, l.Name) }

// PinPath holds the pins of one agent.
func (l Layout) PinPath(node string) string { return filepath.Join(l.PinDir(), node) }
