// SPDX-License-Identifier: Apache-2.0

// Package relay has only tests: services as packets meet them, with the programs
// of pods and of the node on the same tables.
package relay
