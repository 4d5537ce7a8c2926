// SPDX-License-Identifier: Apache-2.0

// Package netpolapi runs the conformance tests of the network-policy-api module,
// code and manifests as they are there, against a lab. It is a module of its own
// because those tests need client-go and controller-runtime, and weft does not.
//
// The tests think that they talk to a cluster: labClient takes what they create
// and change into the lab, execServer does what they run in pods. Every poke is
// a real packet between real pods; SCTP too, see package prober.
package netpolapi
