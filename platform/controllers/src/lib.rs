//! Every reconciler that is not the scheduler or the kubelet.
