// SPDX-License-Identifier: Apache-2.0

package file

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestServiceRow(t *testing.T) {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", Labels: map[string]string{"a": "b"}}}
	row := serviceRow(s)
	if row.Namespace != "shop" || row.Name != "web" || row.Labels["a"] != "b" || row.Spec != &s.Spec {
		t.Errorf("the row is %+v", row)
	}
	if row.Status != nil {
		t.Errorf("a Service without a status has %+v", row.Status)
	}
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.9"}}
	if row = serviceRow(s); row.Status != &s.Status {
		t.Errorf("a Service with a load balancer has status %+v", row.Status)
	}
}
