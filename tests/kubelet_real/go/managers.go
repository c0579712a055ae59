package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"time"
	"unsafe"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra/state"
)

//go:linkname buildDeviceHealth k8s.io/kubernetes/pkg/kubelet/cm/dra.buildDeviceHealth
func buildDeviceHealth(logger klog.Logger, device *deviceHealth) state.DeviceHealth

//go:linkname updateHealthInfo k8s.io/kubernetes/pkg/kubelet/cm/dra.(*healthInfoCache).updateHealthInfo
func updateHealthInfo(
	cache unsafe.Pointer, logger klog.Logger, driver string, devices []state.DeviceHealth,
) ([]state.DeviceHealth, error)

//go:linkname clearDriver k8s.io/kubernetes/pkg/kubelet/cm/dra.(*healthInfoCache).clearDriver
func clearDriver(cache unsafe.Pointer, logger klog.Logger, driver string) error

// Members at the beginning of the kubelet's health cache.
type healthInfoCache struct {
	sync.RWMutex
	HealthInfo *state.DevicesHealthMap
}

func cacheOf(manager *dra.Manager) unsafe.Pointer {
	return reflect.ValueOf(manager).Elem().FieldByName("healthInfoCache").UnsafePointer()
}

// DRA manager that was not started: a test gives it its claims, single messages and the passing of time.
type bareManager struct {
	*dra.Manager
	file    string
	streams map[string]*messageStream
}

// Managers without plugins, by the number that a test gives each.
type managers struct {
	mutex sync.Mutex
	of    map[int]*bareManager
}

// Run a command for a manager without plugins.
func (m *managers) run(ctx context.Context, given command) (any, error) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if given.Do == "open" {
		return nil, m.open(ctx, given)
	}
	manager := m.of[given.Manager]
	if manager == nil {
		return nil, fmt.Errorf("manager %d was not opened", given.Manager)
	}
	logger := klog.FromContext(ctx)
	switch given.Do {
	case "update":
		return manager.update(logger, given)
	case "clear":
		return nil, clearDriver(cacheOf(manager.Manager), logger, given.Driver)
	case "pass":
		manager.pass(time.Duration(given.Seconds * float64(time.Second)))
		return nil, nil
	case "message":
		return nil, manager.message(ctx, given)
	case "end":
		manager.streams[given.Driver].end()
		delete(manager.streams, given.Driver)
		return nil, nil
	case "notified":
		return manager.notified(), nil
	case "status":
		return containerStatuses(ctx, manager.Manager, given.Pod), nil
	case "claims":
		return claims(manager.Manager, given.Pod)
	case "health":
		return health(manager.Manager, given.Driver, given.Pool, given.Device), nil
	}
	return nil, fmt.Errorf("%s: unknown command of a manager", given.Do)
}

// Replace a manager, as a restart does: it reads the files of its directory, with these claims if there are any.
func (m *managers) open(ctx context.Context, given command) error {
	if given.Claims != nil {
		checkpoint, err := state.NewCheckpoint(given.Claims)
		if err != nil {
			return err
		}
		kept, err := state.NewCheckpointer(given.Root, "dra_manager_state")
		if err == nil {
			err = kept.Store(checkpoint)
		}
		if err != nil {
			return err
		}
	}
	manager, err := dra.NewManager(klog.FromContext(ctx), nil, given.Root)
	if err != nil {
		return err
	}
	if m.of == nil {
		m.of = map[int]*bareManager{}
	}
	file := filepath.Join(given.Root, "dra_health_state")
	m.of[given.Manager] = &bareManager{manager, file, map[string]*messageStream{}}
	return nil
}

// Give a list to the health cache. Return the changed devices, and whether the cache wrote its file.
func (m *bareManager) update(logger klog.Logger, given command) (any, error) {
	response := &watchResponse{}
	if err := proto.Unmarshal(given.Wire, response); err != nil {
		return nil, err
	}
	devices := []state.DeviceHealth{}
	for _, device := range response.GetDevices() {
		devices = append(devices, buildDeviceHealth(logger, device))
	}
	before, _ := os.Stat(m.file)
	changed, err := updateHealthInfo(cacheOf(m.Manager), logger, given.Driver, devices)
	after, _ := os.Stat(m.file)
	return fields{"changed": changed, "saved": after != nil && !os.SameFile(before, after)}, err
}

// Make all entries of the health cache older.
func (m *bareManager) pass(by time.Duration) {
	cache := (*healthInfoCache)(cacheOf(m.Manager))
	cache.Lock()
	defer cache.Unlock()
	for _, driver := range *cache.HealthInfo {
		for key, device := range driver.Devices {
			device.LastUpdated = device.LastUpdated.Add(-by)
			driver.Devices[key] = device
		}
	}
}

// Give a message to the driver's health stream, which the first message opens, and wait until it was handled.
func (m *bareManager) message(ctx context.Context, given command) error {
	response := &watchResponse{}
	if err := proto.Unmarshal(given.Wire, response); err != nil {
		return err
	}
	stream := m.streams[given.Driver]
	if stream == nil {
		stream = &messageStream{messages: make(chan *watchResponse), idle: make(chan struct{})}
		m.streams[given.Driver] = stream
		go func() {
			_ = m.HandleWatchResourcesStream(ctx, stream, given.Driver)
			close(stream.idle)
		}()
		<-stream.idle
	}
	stream.messages <- response
	<-stream.idle
	return nil
}

// Return the pods of each notification since the last call.
func (m *bareManager) notified() [][]string {
	found := [][]string{}
	for {
		select {
		case update := <-m.Updates():
			found = append(found, update.PodUIDs)
		default:
			return found
		}
	}
}

// Health stream whose messages come from a test.
type messageStream struct {
	grpc.ClientStream
	messages chan *watchResponse
	idle     chan struct{} // has a value when the kubelet waits for a message, is closed at the end
}

func (s *messageStream) Recv() (*watchResponse, error) {
	s.idle <- struct{}{}
	message, ok := <-s.messages
	if !ok {
		return nil, io.EOF
	}
	return message, nil
}

// End the stream in order, and wait until the kubelet has handled that.
func (s *messageStream) end() {
	close(s.messages)
	<-s.idle
}
