//! A container for tests.

use mayfly_runtime::{ContainerId, ContainerSpec, PodUid, ProcessOptions};

/// A container that only has an image.
pub(crate) fn container() -> ContainerSpec {
    ContainerSpec {
        id: ContainerId { pod: PodUid("uid".into()), name: "c".into(), attempt: 0 },
        image: "busybox".into(),
        command: vec![],
        args: vec![],
        env: vec![],
        memory_bytes_max: None,
        cpu_millis_max: None,
        ports: vec![],
        log_path: "/log".into(),
        files: None,
        process: ProcessOptions::default(),
    }
}
