//go:build !kubelet_1_36

package main

import (
	"context"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	healthapi "k8s.io/kubelet/pkg/apis/dra-health/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager/cache"
)

// Messages of the health API, in the version that the kubelet's manager handles.
type (
	watchResponse = healthapi.NodeWatchResourcesResponse
	deviceHealth  = healthapi.DeviceHealth
)

// The DRA manager's handler; reports each registration and its end.
type handler struct {
	cache.PluginHandler
	out *output
}

func (h *handler) RegisterPlugin(
	ctx context.Context, driver, endpoint string, services []string, timeout *time.Duration,
) error {
	err := h.PluginHandler.RegisterPlugin(ctx, driver, endpoint, services, timeout)
	if err == nil {
		h.out.write(fields{"event": "registered", "driver": driver, "endpoint": endpoint, "services": services})
	}
	return err
}

func (h *handler) DeRegisterPlugin(ctx context.Context, driver, endpoint string) {
	h.PluginHandler.DeRegisterPlugin(ctx, driver, endpoint)
	h.out.write(fields{"event": "deregistered", "driver": driver, "endpoint": endpoint})
}

func updateStatus(logger klog.Logger, manager *dra.Manager, pod *v1.Pod, status *v1.PodStatus) {
	manager.UpdateAllocatedResourcesStatus(logger, pod, status)
}
