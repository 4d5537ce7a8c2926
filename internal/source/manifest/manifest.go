// SPDX-License-Identifier: Apache-2.0

// Package manifest decodes files of Kubernetes manifests strictly: every field
// must exist, be written once and have the right type and a value that makes
// sense, and whatever is wrong is reported with its document, its field, its
// value and what was expected. One wrong document never hides another.
//
// The kinds that weft reads come back as their k8s.io/api types, with the
// defaults of the Kubernetes API filled in. Objects of API groups that weft
// does not read (custom resources, RBAC and so on) pass through unseen as
// unstructured objects.
package manifest

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/weft-mesh/weft/internal/state"
)

// Limits of one file. What is beyond them is an error that names the file.
const (
	MaxFileSize  = 4 << 20 // bytes
	MaxDocuments = 10000
	maxProblems  = 20 // of one document
)

// Ref names an object of the cluster.
type Ref struct {
	Group     string // API group without the version; empty for the core kinds
	Kind      string
	Namespace string // empty for what is not in a namespace
	Name      string
}

// String is "Pod default/web", or "Node n1" outside namespaces.
func (r Ref) String() string {
	if r.Namespace == "" {
		return r.Kind + " " + r.Name
	}
	return r.Kind + " " + state.Key(r.Namespace, r.Name)
}

// Object is one good object of a manifest file. It is immutable.
type Object struct {
	Ref
	File     string         // as given to Decode
	Document int            // 0 for the first of the file
	Line     int            // 1-based, of the file, where the document begins
	Typed    runtime.Object // *corev1.Pod and so on, or *unstructured.Unstructured
	Raw      []byte         // the document as written, without its "---"
}

// Document is one document of a manifest file, good or bad. It has either an
// Object or Errors.
type Document struct {
	Number int
	Line   int
	// Ref is what the document defines. It is known for many a bad document
	// too; where it is not, Name is empty.
	Ref    Ref
	Object *Object
	Errors []state.SourceError
}

// Decode returns the good objects of a manifest file and what is wrong with
// the others. file is for messages; a name that ends in ".json" is read as a
// sequence of JSON objects, everything else as YAML. Two documents that define
// the same object are an error of the second.
func Decode(file string, data []byte) (objs []Object, errs []state.SourceError) {
	for _, d := range Documents(file, data) {
		if d.Object != nil {
			objs = append(objs, *d.Object)
		}
		errs = append(errs, d.Errors...)
	}
	return objs, errs
}

// Documents is Decode, document by document in the order of the file. Empty
// documents are left out.
func Documents(file string, data []byte) []Document {
	if len(data) > MaxFileSize {
		return []Document{fileError(file, fmt.Sprintf("file has %d bytes: want at most %d", len(data), MaxFileSize))}
	}
	chunks, err := split(file, data)
	if err != nil {
		return []Document{fileError(file, err.Error())}
	}
	seen := map[Ref]int{}
	docs := make([]Document, 0, len(chunks))
	for _, c := range chunks {
		d, ok := decodeDocument(file, c)
		if !ok {
			continue
		}
		if first, dup := seen[d.Ref]; dup && d.Object != nil {
			d.Object = nil
			d.Errors = []state.SourceError{{File: file, Document: d.Number, Field: "metadata.name", Message: Duplicate(d.Ref, file, first)}}
		} else if d.Object != nil {
			seen[d.Ref] = d.Number
		}
		docs = append(docs, d)
	}
	return docs
}

// Duplicate is the message for an object that file and document defined first.
func Duplicate(r Ref, file string, document int) string {
	return fmt.Sprintf("%s is already defined in %s, document %d: want each object once", r, file, document)
}

// Format is a source error as one line for people: "FILE, document N, FIELD:
// MESSAGE".
func Format(e state.SourceError) string {
	parts := []string{fmt.Sprintf("%s, document %d", e.File, e.Document)}
	if e.Field != "" {
		parts = append(parts, e.Field)
	}
	return strings.Join(parts, ", ") + ": " + e.Message
}

func fileError(file, message string) Document {
	return Document{Errors: []state.SourceError{{File: file, Message: message}}}
}

// decodeDocument decodes one chunk. ok is false for an empty one.
func decodeDocument(file string, c chunk) (d Document, ok bool) {
	p := &problems{}
	tree, body := parse(c, p)
	if tree == nil && len(p.list) == 0 {
		return Document{}, false
	}
	d = Document{Number: c.number, Line: c.line}
	if m, isObject := tree.(map[string]any); isObject {
		d.Ref = refOf(m)
		d.Object = decodeObject(m, body, p)
	} else if tree != nil {
		p.add(nil, tree, "a Kubernetes object with apiVersion, kind and metadata")
	}
	if len(p.list) > 0 {
		d.Object, d.Errors = nil, p.errors(file, c.number)
		return d, true
	}
	d.Object.Ref, d.Object.File, d.Object.Document, d.Object.Line, d.Object.Raw = d.Ref, file, c.number, c.line, c.data
	return d, true
}
