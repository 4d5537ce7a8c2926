// SPDX-License-Identifier: Apache-2.0

// Package api is what the verbs of `weft lab` and the lab's daemon say to each
// other: JSON over HTTP on a unix socket.
package api

import (
	"time"

	"github.com/weft-mesh/weft/internal/lab/node"
	"github.com/weft-mesh/weft/internal/lab/shim"
	"github.com/weft-mesh/weft/internal/state"
)

// Paths of the daemon.
const (
	PathUp     = "/v1/up"
	PathApply  = "/v1/apply"
	PathDelete = "/v1/delete"
	PathAgent  = "/v1/agent"
	PathStatus = "/v1/status"
	PathTarget = "/v1/target"
	PathStop   = "/v1/stop"
)

// File is a manifest file with its content.
type File struct {
	Name string `json:"name"`
	Data []byte `json:"data"`
}

// Files is the body of up, apply and delete.
type Files struct {
	Files   []File        `json:"files"`
	Timeout time.Duration `json:"timeout"`
}

// AgentVerb is the body of PathAgent.
type AgentVerb struct {
	Node    string        `json:"node"`
	Verb    string        `json:"verb"` // kill, start, restart
	Timeout time.Duration `json:"timeout"`
}

// Line is one line of a streamed answer: progress, and one result at the end.
type Line struct {
	Progress string  `json:"progress,omitempty"`
	Result   *Result `json:"result,omitempty"`
}

// Result is how a verb ended: well, if both lists are empty.
type Result struct {
	// Refused is what was wrong with the input; then nothing was changed.
	Refused []state.SourceError `json:"refused,omitempty"`
	// Failures is what was not done or is not in force, and why.
	Failures []string `json:"failures,omitempty"`
	// Broken says that there is no lab to speak of: its nodes could not be made.
	Broken bool `json:"broken,omitempty"`
}

// Error is the answer to a request that was refused.
type Error struct {
	Error string `json:"error"`
}

// Status is the answer to PathStatus.
type Status struct {
	Lab         string       `json:"lab"`
	Dir         string       `json:"dir"`
	Tunnel      string       `json:"tunnel"`
	MTU         int          `json:"mtu"`
	Generation  uint64       `json:"generation"`
	Underlay    string       `json:"underlay"` // network namespace
	Nodes       []Node       `json:"nodes"`
	Deployments []Deployment `json:"deployments"`
	Pods        []Pod        `json:"pods"`
	Services    []Service    `json:"services"`
}

// Node of a lab.
type Node struct {
	Name     string     `json:"name"`
	IPs      []string   `json:"ips"`
	PodCIDRs []string   `json:"podCIDRs"`
	NetNS    string     `json:"netns"`
	Socket   string     `json:"socket"`
	Agent    node.State `json:"agent"`
	Ready    bool       `json:"ready"`
	Message  string     `json:"message,omitempty"`
}

// Deployment of a lab.
type Deployment struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Wanted    int    `json:"wanted"`
	Ready     int    `json:"ready"`
	Pods      int    `json:"pods"` // without those that are terminating
}

// Pod of a lab.
type Pod struct {
	Namespace      string            `json:"namespace"`
	Name           string            `json:"name"`
	Node           string            `json:"node"`
	IPs            []string          `json:"ips"`
	Phase          string            `json:"phase"`
	Ready          bool              `json:"ready"`
	Terminating    bool              `json:"terminating,omitempty"`
	Restarts       int               `json:"restarts"`
	Message        string            `json:"message,omitempty"`
	Labels         map[string]string `json:"labels,omitempty"`
	ServiceAccount string            `json:"serviceAccount"`
	NetNS          string            `json:"netns"`
	ContainerID    string            `json:"containerID,omitempty"` // of the sandbox
	Cgroup         string            `json:"cgroup"`
}

// Service of a lab.
type Service struct {
	Namespace string   `json:"namespace"`
	Name      string   `json:"name"`
	Type      string   `json:"type"`
	IPs       []string `json:"ips"`
	External  []string `json:"external,omitempty"` // external IPs and those of load balancers
	Ports     []string `json:"ports"`              // PORT/PROTOCOL, PORT:NODEPORT/PROTOCOL
	Endpoints int      `json:"endpoints"`          // ready pods
}

// Target is the answer to PathTarget: a container and how to get into it.
type Target struct {
	Pod       string    `json:"pod"` // NAMESPACE/NAME
	Node      string    `json:"node"`
	Container string    `json:"container"`
	Log       string    `json:"log"`
	Running   bool      `json:"running"`
	Spec      shim.Spec `json:"spec"` // without Argv
}
