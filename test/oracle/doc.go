// SPDX-License-Identifier: Apache-2.0

// Package oracle holds a test of Services as a whole: random Services and
// EndpointSlices are put into the tables, real connections are made to every
// frontend from a pod, from the node and from outside, and the backends that
// these reach are compared with what a dumb model of Kubernetes' rules says.
//
//	go test -v ./test/oracle                          # less than a minute
//	WEFT_SLOW=1 go test -v ./test/oracle -seed 7      # longer, other Services
package oracle
