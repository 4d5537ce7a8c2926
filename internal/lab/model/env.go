// SPDX-License-Identifier: Apache-2.0

package model

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// fieldPaths are those of valueFrom.fieldRef, but for single labels and
// annotations.
var fieldPaths = map[string]func(*corev1.Pod) string{
	"metadata.name":           func(p *corev1.Pod) string { return p.Name },
	"metadata.namespace":      func(p *corev1.Pod) string { return p.Namespace },
	"metadata.uid":            func(p *corev1.Pod) string { return string(p.UID) },
	"spec.nodeName":           func(p *corev1.Pod) string { return p.Spec.NodeName },
	"spec.serviceAccountName": func(p *corev1.Pod) string { return p.Spec.ServiceAccountName },
	"status.podIP":            func(p *corev1.Pod) string { return p.Status.PodIP },
	"status.podIPs":           podIPs,
	"status.hostIP":           func(p *corev1.Pod) string { return p.Status.HostIP },
}

func podIPs(p *corev1.Pod) string {
	ips := make([]string, 0, len(p.Status.PodIPs))
	for _, ip := range p.Status.PodIPs {
		ips = append(ips, ip.IP)
	}
	return strings.Join(ips, ",")
}

// FieldValue returns the field of p that an environment variable refers to. A
// label that is not there is empty.
func FieldValue(p *corev1.Pod, path string) (string, error) {
	if f, ok := fieldPaths[path]; ok {
		return f(p), nil
	}
	for name, m := range map[string]map[string]string{"metadata.labels": p.Labels, "metadata.annotations": p.Annotations} {
		if key, ok := strings.CutPrefix(path, name+"['"); ok && strings.HasSuffix(key, "']") {
			return m[strings.TrimSuffix(key, "']")], nil
		}
	}
	return "", fmt.Errorf("want metadata.name, metadata.namespace, metadata.uid, metadata.labels['KEY'], metadata.annotations['KEY'], " +
		"spec.nodeName, spec.serviceAccountName, status.podIP, status.podIPs or status.hostIP")
}

// Environment returns the variables that the manifest gives to a container, in
// order, KEY=VALUE. Later variables may refer to earlier ones, as $(KEY).
func Environment(p *corev1.Pod, ct *corev1.Container) ([]string, error) {
	known := map[string]string{}
	env := make([]string, 0, len(ct.Env))
	for _, e := range ct.Env {
		value := Expand(e.Value, known)
		if e.ValueFrom != nil && e.ValueFrom.FieldRef != nil {
			var err error
			if value, err = FieldValue(p, e.ValueFrom.FieldRef.FieldPath); err != nil {
				return nil, fmt.Errorf("environment variable %s: %w", e.Name, err)
			}
		}
		known[e.Name] = value
		env = append(env, e.Name+"="+value)
	}
	return env, nil
}

// Argv returns command and args of a container with each $(KEY) replaced.
func Argv(ct *corev1.Container, env []string) []string {
	known := map[string]string{}
	for _, kv := range env {
		key, value, _ := strings.Cut(kv, "=")
		known[key] = value
	}
	var argv []string
	for _, list := range [][]string{ct.Command, ct.Args} {
		for _, arg := range list {
			argv = append(argv, Expand(arg, known))
		}
	}
	return argv
}

// Expand replaces $(KEY) by its value, $$ by $, and leaves a $(KEY) that is not
// known, as Kubernetes does.
func Expand(s string, known map[string]string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '$' || i+1 == len(s) {
			b.WriteByte(s[i])
			continue
		}
		switch end := strings.IndexByte(s[i:], ')'); {
		case s[i+1] == '$':
			b.WriteByte('$')
			i++
		case s[i+1] == '(' && end > 0:
			ref := s[i : i+end+1]
			if v, ok := known[ref[2:len(ref)-1]]; ok {
				ref = v
			}
			b.WriteString(ref)
			i += end
		default:
			b.WriteByte('$')
		}
	}
	return b.String()
}
