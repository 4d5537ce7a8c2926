// SPDX-License-Identifier: Apache-2.0

// Package wire has only tests: the datapath of two nodes on real devices in
// network namespaces, with real sockets at both ends.
package wire
