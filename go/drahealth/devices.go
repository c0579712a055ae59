// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package drahealth

import (
	"context"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "drahealth.example.com/go/drahealthv1"
)

const (
	// syncTimeout limits a declaration, which takes up to two seconds, or longer with a hung disk.
	// Health streams do not depend on the declaration.
	syncTimeout = 5 * time.Second
	// declareMax is the longest pause before a failed declaration is repeated.
	declareMax = 30 * time.Second
	// declareEvery is the time between two declarations of the same devices after a stream was opened (Client.reopened),
	// declareWatch how long a client makes them.
	declareEvery = time.Minute
	declareWatch = time.Hour
	// defaultLease is the kubelet's lease of a device without its own.
	defaultLease = 30 * time.Second
)

// device is the name of a device of the driver.
type device struct{ pool, name string }

// Device is a device of the driver's ResourceSlice, and the part of the machine behind it, which the agent
// evaluates. The limits of the values are those of docs/declared-devices.md; the agent checks them.
type Device struct {
	// Name is the name in the ResourceSlice.
	Name string
	// Pool is the name of the resource pool. For the agent an empty pool is the node's name, but while the
	// agent is absent a device without a pool cannot be reported as Unknown.
	Pool string
	// Lease is how long the kubelet uses a verdict, in whole seconds; 0: the agent's default.
	Lease time.Duration
	// Part is CPUs, Hugepages, Memory, GPU, NIC or PCI; nil: only the driver's own checks evaluate the device,
	// see Check.
	Part Part
}

// Part is the part of the machine behind a device: CPUs, Hugepages, Memory, GPU, NIC or PCI.
type Part interface{ setPart(*pb.DeclaredDevice) }

// CPUs are CPUs of the machine.
type CPUs struct {
	List      string // in the kernel's list format, "0-3,8"
	NUMA      *int   // NUMA node that the CPUs must be on; nil: any
	Exclusive bool   // whether only the claim's pods use the CPUs; their containers must not be throttled then
	Isolated  bool   // whether the CPUs must be isolated (isolcpus)
}

// Hugepages are pages of a NUMA node's hugepage pool.
type Hugepages struct {
	Size  string // of a page, as a Kubernetes quantity: "2Mi"
	Pages int64
	NUMA  int
}

// Memory is memory of a NUMA node.
type Memory struct {
	Size string // Kubernetes quantity, "64Gi"; empty: not specified
	NUMA int
}

// GPU is a GPU, or an instance of a GPU. At least one of PCI and UUID is set.
type GPU struct {
	PCI    string // address, "0000:3b:00.0"
	UUID   string // "GPU-..." for a GPU, "MIG-..." for an instance
	GI, CI *int   // GPU instance and compute instance; both or none
}

// NIC is an RDMA network adapter. Exactly one of PCI and RDMA is set.
type NIC struct {
	PCI  string // address, "0000:41:00.0"
	RDMA string // name, "mlx5_0"
}

// PCI is any other PCI function.
type PCI struct {
	Address string // "0000:5e:00.1"
	Driver  string // kernel driver that must be bound to the function; empty: any, or none
}

func (p CPUs) setPart(device *pb.DeclaredDevice) {
	cpus := &pb.CpusPart{Cpus: p.List, Numa: wide(p.NUMA), Exclusive: p.Exclusive, Isolated: p.Isolated}
	device.Part = &pb.DeclaredDevice_Cpus{Cpus: cpus}
}

func (p Hugepages) setPart(device *pb.DeclaredDevice) {
	pages := &pb.HugepagesPart{Size: p.Size, Pages: p.Pages, Numa: int64(p.NUMA)}
	device.Part = &pb.DeclaredDevice_Hugepages{Hugepages: pages}
}

func (p Memory) setPart(device *pb.DeclaredDevice) {
	device.Part = &pb.DeclaredDevice_Memory{Memory: &pb.MemoryPart{Size: p.Size, Numa: int64(p.NUMA)}}
}

func (p GPU) setPart(device *pb.DeclaredDevice) {
	gpu := &pb.GpuPart{Pci: p.PCI, Uuid: p.UUID, Gi: wide(p.GI), Ci: wide(p.CI)}
	device.Part = &pb.DeclaredDevice_Gpu{Gpu: gpu}
}

func (p NIC) setPart(device *pb.DeclaredDevice) {
	device.Part = &pb.DeclaredDevice_Nic{Nic: &pb.NicPart{Pci: p.PCI, Rdma: p.RDMA}}
}

func (p PCI) setPart(device *pb.DeclaredDevice) {
	device.Part = &pb.DeclaredDevice_Pci{Pci: &pb.PciPart{Address: p.Address, Driver: p.Driver}}
}

// wide converts an optional number.
func wide(number *int) *int64 {
	if number == nil {
		return nil
	}
	return new(int64(*number))
}

// messageOf returns the device as the agent gets it. A lease is rounded up to whole seconds.
func messageOf(device Device) *pb.DeclaredDevice {
	lease := int64((device.Lease + time.Second - 1) / time.Second)
	message := &pb.DeclaredDevice{Name: device.Name, Pool: device.Pool, LeaseS: lease}
	if device.Part != nil {
		device.Part.setPart(message)
	}
	return message
}

// declaration has the devices of one call of Declare. Only sync changes reported, refused and accepted.
type declaration struct {
	devices  []*pb.DeclaredDevice
	reported bool // OnError got the agent's error
	refused  bool // the agent will never accept it; another agent can
	names    map[device]bool
	accepted atomic.Bool // the agent accepted it, or an earlier one, since the last stream was opened
}

// has reports whether a device is declared; all are without a declaration. A declared device without a pool has
// any pool.
func (d *declaration) has(key device) bool {
	return d == nil || d.names[key] || d.names[device{"", key.name}]
}

// Declare sets all devices of the driver, which the agent evaluates from then on. They are declared
// again on each new connection, and in the client's first hour once more in the two minutes after it. A driver that
// writes devices.d does not call Declare.
//
// Declare returns at once. OnError gets the agent's refusal once; invalid devices are declared again with the
// next call or stream only. An agent that is too old for declarations is not an error.
func (c *Client) Declare(devices ...Device) {
	c.redeclare(append([]Device{}, devices...))
}

// keepDeclared repeats declarations until they succeed, and in the first hour also after a new stream. In a rolling
// update, after a restart of the agent or the kubelet, both instances of the driver declare their devices, in any order:
// the new instance must be the last. The former one, whose first hour is over, must not replace these devices, and no
// instance may do so while its streams stay open: the next update can begin within the hour.
func (c *Client) keepDeclared() {
	for began := time.Now(); ; {
		var again <-chan time.Time
		if time.Since(began) < declareWatch {
			again = time.After(declareEvery)
		}
		select {
		case <-c.background.Done():
			return
		case <-c.undeclared:
		case <-again: // the agent writes nothing if the devices are the same
			if at := c.reopened.Load(); at == nil || time.Since(*at) > 2*declareEvery {
				continue
			}
		}
		for pause := reconnectMax; c.sync(c.background, false) != nil; pause = min(2*pause, declareMax) {
			select {
			case <-c.background.Done():
				return
			case <-c.undeclared: // new devices, or a new connection
			case <-time.After(pause):
			}
		}
	}
}

// declareAgain declares the devices and sends the results of checks before a stream begins: the agent may be a
// new one.
func (c *Client) declareAgain(ctx context.Context) {
	c.reopened.Store(new(time.Now()))
	c.checks.resend()
	if c.sync(ctx, true) != nil {
		fill(c.undeclared)
	}
}

// sync declares the devices, unless there are none or the agent has refused them. A refusal does not count for a
// new stream, whose agent can be another version. sync returns an error if a repetition can help.
func (c *Client) sync(ctx context.Context, newStream bool) error {
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()
	select {
	case c.syncing <- struct{}{}:
		defer func() { <-c.syncing }()
	case <-ctx.Done():
		return ctx.Err()
	}
	declared := c.declared.Load()
	if declared == nil || (declared.refused && !newStream) {
		return nil
	}
	declared.refused = false
	_, err := c.link.SyncDevices(ctx, &pb.SyncDevicesRequest{Devices: declared.devices})
	if err == nil || newStream { // an agent that refuses other devices keeps the earlier ones
		declared.accepted.Store(err == nil)
	}
	switch status.Code(err) {
	case codes.OK:
		c.doubt(0)
		c.checks.accepted(declared)
		return nil
	case codes.Unimplemented:
		return nil
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return err // the health stream reports that the agent is absent
	case codes.InvalidArgument:
		declared.refused = true
	}
	if !declared.reported {
		declared.reported = true
		c.complain(ctx, err, "the drahealth agent refused the driver's devices")
	}
	return err
}
