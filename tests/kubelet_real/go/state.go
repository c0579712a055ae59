package main

import (
	"fmt"
	"reflect"
	"sync"
	"time"
	"unsafe"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra/state"
)

// Look up the health of a device as the status of a pod does. The method and its receiver have no exported name.
//
//go:linkname getHealthInfo k8s.io/kubernetes/pkg/kubelet/cm/dra.(*healthInfoCache).getHealthInfo
func getHealthInfo(cache unsafe.Pointer, driver, pool, device string) state.DeviceHealth

func health(manager *dra.Manager, driver, pool, device string) state.DeviceHealth {
	return getHealthInfo(cacheOf(manager), driver, pool, device)
}

// State of a claim, with whether this process of the kubelet has prepared it.
type claimState struct {
	state.ClaimInfoState
	Prepared bool
}

// Return the kubelet's state of all claims of a pod's first container.
func claims(manager *dra.Manager, pod *v1.Pod) ([]claimState, error) {
	infos, err := manager.GetContainerClaimInfos(pod, &pod.Spec.Containers[0])
	found := []claimState{}
	for _, info := range infos {
		prepared := reflect.ValueOf(info).Elem().FieldByName("prepared").Bool()
		found = append(found, claimState{info.ClaimInfoState, prepared})
	}
	return found, err
}

// Event correlators of client-go with their defaults, by the number that a test gives each, and a clock that it sets.
type correlators struct {
	mutex sync.Mutex
	of    map[int]*record.EventCorrelator
	nowNs int64
}

func (c *correlators) Now() time.Time                   { return time.Unix(0, c.nowNs) }
func (c *correlators) Since(at time.Time) time.Duration { return c.Now().Sub(at) }

// Return the event that the recorder would write, nil for none.
func (c *correlators) correlate(given command) (*v1.Event, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.nowNs = given.NowNs
	correlator := c.of[given.Correlator]
	if correlator == nil {
		correlator = record.NewEventCorrelatorWithOptions(record.CorrelatorOptions{Clock: c})
		if c.of == nil {
			c.of = map[int]*record.EventCorrelator{}
		}
		c.of[given.Correlator] = correlator
	}
	now := metav1.NewTime(c.Now())
	pod := given.Pod
	event := &v1.Event{
		ObjectMeta:     metav1.ObjectMeta{Name: fmt.Sprintf("%d.%x", given.Correlator, given.ID), Namespace: pod.Namespace},
		InvolvedObject: v1.ObjectReference{Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
		Source:         v1.EventSource{Component: "kubelet"},
		Type:           v1.EventTypeWarning,
		Reason:         given.Reason,
		Message:        given.Message,
		Count:          1,
		FirstTimestamp: now,
		LastTimestamp:  now,
	}
	result, err := correlator.EventCorrelate(event)
	if err != nil || result.Skip {
		return nil, err
	}
	correlator.UpdateState(result.Event)
	return result.Event, nil
}
