// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"tags.cncf.io/container-device-interface/specs-go"

	"drahealth.example.com/go/drahealth"
)

const (
	name  = "godev.drahealth.example.com"
	cpus  = "cpus-node0-0"
	pages = "hugepages-2mi-node1-0"
)

// newDriver returns a driver on a host of plain files: CPUs 0-3 online, 8 of 8 pages free.
func newDriver(t *testing.T) *driver {
	t.Helper()
	h := &host{sysfs: t.TempDir()}
	for _, err := range []error{h.addCPUs("0-3"), h.addCPUs("4-5"), h.addHugepages("2Mi:8@1")} {
		if err != nil {
			t.Fatal(err)
		}
	}
	d := &driver{name: name, node: "node-1", host: h, cdi: cdiFiles{t.TempDir(), name}}
	d.onHost(t, "devices/system/cpu/online", "0-3")
	d.onHost(t, "devices/system/node/node1/hugepages/hugepages-2048kB/free_hugepages", "8")
	return d
}

func (d *driver) onHost(t *testing.T, path, text string) {
	t.Helper()
	path = filepath.Join(d.host.sysfs, path)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text+"\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
}

// claimOf returns a claim with one device for each request "r0", "r1"...
func claimOf(parameters string, devices ...string) *resourceapi.ResourceClaim {
	allocation := &resourceapi.AllocationResult{}
	for number, device := range devices {
		allocation.Devices.Results = append(allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: fmt.Sprintf("r%d/first", number), Driver: name, Pool: "node-1", Device: device,
		})
	}
	if parameters != "" {
		allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
			DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
				Driver: name, Parameters: runtime.RawExtension{Raw: []byte(parameters)},
			}},
		}}
	}
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "it", UID: "uid"},
		Status:     resourceapi.ResourceClaimStatus{Allocation: allocation},
	}
}

func parametersOf(kind, rest string) string {
	return fmt.Sprintf(`{"apiVersion": "%s/v1", "kind": %q, %s}`, name, kind, rest)
}

// evidence returns the evidence for the agent in lines.
func evidence(err error) string { return strings.Join(drahealth.Evidence(err), "\n") }

func TestPrepareIsIdempotent(t *testing.T) {
	d := newDriver(t)
	claim := claimOf("", cpus, pages)
	first, err := d.prepare(t.Context(), claim)
	if err != nil {
		t.Fatal(err)
	}
	d.onHost(t, "devices/system/node/node1/hugepages/hugepages-2048kB/free_hugepages", "0") // the pod uses them
	again, err := d.prepare(t.Context(), claim)
	if err != nil || fmt.Sprint(first) != fmt.Sprint(again) || len(first) != 2 || first[0].CDIDeviceIDs[0] == first[1].CDIDeviceIDs[0] {
		t.Errorf("%v, then %v (%v)", first, again, err)
	}
	var spec specs.Spec
	data, err := os.ReadFile(d.cdi.path(claim.UID))
	if err := errors.Join(err, json.Unmarshal(data, &spec)); err != nil {
		t.Fatal(err)
	}
	if got := spec.Devices[0].ContainerEdits.Env[0]; got != "GODEV_CPUS_NODE0_0=0-3" {
		t.Error(got)
	}
	if got := spec.Devices[1].ContainerEdits.Mounts[0].Options; got[len(got)-1] != "size=16384K" {
		t.Error(got)
	}
	object := kubeletplugin.NamespacedObject{NamespacedName: types.NamespacedName{Name: "it"}, UID: claim.UID}
	if err := errors.Join(d.unprepare(t.Context(), object), d.unprepare(t.Context(), object)); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(d.cdi.directory); len(left) != 0 {
		t.Errorf("%v is left", left)
	}
}

func TestPrepareErrorsHaveTheirClass(t *testing.T) {
	for _, test := range []struct {
		claim *resourceapi.ResourceClaim
		shows []string
	}{
		{claimOf("", "cpus-node0-1"), []string{"class=failed-device", "cpu.offline", "CPUs 4-5 are not online"}},
		{claimOf("", "cpus-node0-9"), []string{"class=permanent", "device.unknown"}},
		{claimOf("no json", cpus), []string{"decode-error"}},
		{claimOf(parametersOf("CpuParameters", `"cpu": "0"`), cpus), []string{"decode-error", `unknown field \"cpu\"`}},
		{claimOf(parametersOf("CpuParameters", `"CPUs": "0"`), cpus), []string{"decode-error", `unknown field \"CPUs\"`}},
		{claimOf(parametersOf("GpuParameters", `"gpu": 1`), cpus), []string{"decode-error", "neither CpuParameters nor"}},
		{claimOf(parametersOf("CpuParameters", `"cpus": "0-9"`), cpus), []string{"class=bad-config", "cpu.opaque_cpuset.invalid", "CPUs 4-9 are not of"}},
		{claimOf(parametersOf("CpuParameters", `"cpus": "x"`), cpus), []string{"class=bad-config", "is not a CPU list"}},
		{claimOf(parametersOf("CpuParameters", `"cpus": "0"`), pages), []string{"class=bad-config", "config.conflict"}},
		{claimOf(parametersOf("HugepagesParameters", `"pages": 1`), cpus), []string{"class=bad-config", "config.conflict"}},
		{claimOf(parametersOf("HugepagesParameters", `"pages": 9`), pages), []string{"class=bad-config", "9 pages of", "which has 8"}},
	} {
		d := newDriver(t)
		devices, err := d.prepare(t.Context(), test.claim)
		if err == nil || d.cdi.has(test.claim.UID) {
			t.Errorf("%v was given %v", test.claim.Status.Allocation, devices)
			continue
		}
		for _, part := range test.shows {
			if !strings.Contains(evidence(err), part) {
				t.Errorf("%q is not in\n%s", part, evidence(err))
			}
		}
	}
}

func TestParametersSelectPartOfADevice(t *testing.T) {
	d := newDriver(t)
	if _, err := d.prepare(t.Context(), claimOf(parametersOf("HugepagesParameters", `"pages": 3`), pages)); err != nil {
		t.Fatal(err)
	}
	data, _ := os.ReadFile(d.cdi.path("uid"))
	if !strings.Contains(string(data), "size=6144K") {
		t.Errorf("%s", data)
	}
}

func TestInsufficientFreePagesAreTransient(t *testing.T) {
	d := newDriver(t)
	d.onHost(t, "devices/system/node/node1/hugepages/hugepages-2048kB/free_hugepages", "7")
	_, err := d.prepare(t.Context(), claimOf("", pages))
	if shown := evidence(err); !strings.Contains(shown, "class=transient") || !strings.Contains(shown, "8 pages of 2Mi needed on NUMA node 1, 7 are free") {
		t.Error(shown)
	}
}

func TestInterruptedWriteLeavesNoCDIFileAndIsRemoved(t *testing.T) {
	d := newDriver(t)
	if err := os.Mkdir(d.cdi.path("uid"), 0o755); err != nil { // so that the last step of the write fails
		t.Fatal(err)
	}
	if _, err := d.prepare(t.Context(), claimOf("", cpus)); err == nil {
		t.Fatal("a directory was replaced by a file")
	}
	left, err := filepath.Glob(filepath.Join(d.cdi.directory, "*uid*.*"))
	if hidden, _ := filepath.Glob(filepath.Join(d.cdi.directory, ".*")); err != nil || len(left) != 2 || len(hidden) != 0 {
		t.Errorf("left: %v, %v (%v)", left, hidden, err)
	}
	for _, path := range left {
		if path != d.cdi.path("uid") && filepath.Ext(path) == ".json" {
			t.Errorf("container runtimes read %s", path)
		}
	}
	if err := d.unprepare(t.Context(), kubeletplugin.NamespacedObject{UID: "uid"}); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(d.cdi.directory); len(left) != 0 {
		t.Errorf("left after unprepare: %v", left)
	}
}

func TestUnwritableCDIFileHasOperationCDI(t *testing.T) {
	d := newDriver(t)
	d.cdi.directory += "/gone"
	_, err := d.prepare(t.Context(), claimOf("", cpus))
	want := fmt.Sprintf("errno number=%d operation=cdi", int(syscall.ENOENT))
	if shown := drahealth.Evidence(err)[0]; !strings.HasPrefix(shown, want) {
		t.Error(shown)
	}
}

func TestInvalidFlagsAreRefused(t *testing.T) {
	h := &host{}
	for _, flag := range []string{"", "x", "3-1", "0@", "0@1024", "0@-1", "0@x"} {
		if h.addCPUs(flag) == nil {
			t.Errorf("--cpus %q", flag)
		}
	}
	for _, flag := range []string{"", "2Mi", "2Mi:", "2Mi:0", "2Mi:-1", ":8", "x:8", "1:8", "2Mi:8@x"} {
		if h.addHugepages(flag) == nil {
			t.Errorf("--hugepages %q", flag)
		}
	}
	if len(h.devices) != 0 {
		t.Errorf("%v", h.devices)
	}
}

func TestPublishedTaintsAreAwaited(t *testing.T) {
	d := newDriver(t)
	taint := resourceapi.DeviceTaint{Key: name + "/lost", Effect: resourceapi.DeviceTaintEffectNoSchedule}
	pool := d.host.published(map[string][]resourceapi.DeviceTaint{cpus: {taint}})
	slice := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "it"},
		Spec:       resourceapi.ResourceSliceSpec{Driver: name, NodeName: &d.node, Devices: d.host.published(nil).Slices[0].Devices},
	}
	client := fake.NewClientset(slice)
	ctx, cancel := context.WithTimeout(t.Context(), 3*publishPoll)
	defer cancel()
	if err := d.waitPublished(ctx, client, pool); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v without the taint", err)
	}
	slice.Spec.Devices = pool.Slices[0].Devices
	timer := time.AfterFunc(2*publishPoll, func() {
		_, _ = client.ResourceV1().ResourceSlices().Update(t.Context(), slice, metav1.UpdateOptions{})
	})
	defer timer.Stop()
	if err := d.waitPublished(t.Context(), client, pool); err != nil {
		t.Error(err)
	}
}

func TestSlicesHaveAtMost64Devices(t *testing.T) {
	h := &host{}
	for range 130 {
		if err := h.addCPUs("0"); err != nil {
			t.Fatal(err)
		}
	}
	taint := resourceapi.DeviceTaint{Key: name + "/lost", Effect: resourceapi.DeviceTaintEffectNoSchedule}
	pool := h.published(map[string][]resourceapi.DeviceTaint{"cpus-node0-129": {taint}})
	var sizes []int
	for _, slice := range pool.Slices {
		sizes = append(sizes, len(slice.Devices))
	}
	if fmt.Sprint(sizes) != "[64 64 2]" || len(pool.Slices[2].Devices[1].Taints) != 1 {
		t.Errorf("%v", sizes)
	}
	if empty := (&host{}).published(nil); len(empty.Slices) != 1 {
		t.Errorf("%v: expected one slice without devices", empty)
	}
}
