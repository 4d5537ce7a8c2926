// SPDX-License-Identifier: Apache-2.0

package tombstone

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestRoundTrip(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cni")
	if list, err := List(dir); len(list) != 0 || err != nil {
		t.Errorf("no folder: %v %v", list, err)
	}
	want := Tombstone{ContainerID: "c1", Interface: "eth0", Network: "weft", Netns: "/n"}
	for range 2 {
		if err := Write(dir, want); err != nil {
			t.Fatal(err)
		}
	}
	list, err := List(dir)
	if err != nil || len(list) != 1 || list[0] != want {
		t.Errorf("List = %v %v", list, err)
	}
	if ok, err := Exists(dir, want); !ok || err != nil {
		t.Errorf("Exists = %v %v", ok, err)
	}
	for range 2 {
		if err := Remove(dir, want); err != nil {
			t.Fatal(err)
		}
	}
	if ok, err := Exists(dir, want); ok || err != nil {
		t.Errorf("Exists = %v %v", ok, err)
	}
}

// What is not a whole note is named, and does not hide the others.
func TestDamaged(t *testing.T) {
	dir := t.TempDir()
	if err := Write(dir, Tombstone{ContainerID: "c1", Interface: "eth0"}); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{"c2-eth0": "{", "c3-eth0": `{"containerID":"c4","interface":"eth0"}`, ".123": "{"} {
		if err := os.WriteFile(filepath.Join(dir, folder, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	list, err := List(dir)
	if len(list) != 1 || err == nil || !strings.Contains(err.Error(), "c2-eth0: unexpected end") || !strings.Contains(err.Error(), "c3-eth0 is about c4-eth0") {
		t.Errorf("List = %v %v", list, err)
	}
	for _, bad := range []Tombstone{{}, {ContainerID: "../x", Interface: "eth0"}, {ContainerID: "c1", Interface: ".."}} {
		if Write(dir, bad) == nil || Remove(dir, bad) == nil {
			t.Errorf("%+v was accepted", bad)
		}
	}
}
