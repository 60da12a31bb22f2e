//! The paths below the runtime's directory.
//!
//! ```text
//! ROOT/containerd/            containerd's own: config.toml, root, state, log
//! ROOT/containerd.sock
//! ROOT/seccomp/               system call filters that pods name (`Localhost`)
//! ROOT/network/               subnet, address leases
//! ROOT/pods/UID/sandbox.json  the state of a sandbox that a restarted process needs
//! ROOT/pods/UID/ns/{net,ipc,uts}
//! ROOT/pods/UID/{hosts,hostname,resolv.conf}
//! ROOT/pods/UID/shm           a mount: the containers' /dev/shm
//! ROOT/pods/UID/NAME_ATTEMPT/ a container: container.json, exit.json, message, stdin, log.json
//! ROOT/s/ID                   sockets for attach; their paths must be short
//! ROOT/exec/                  FIFOs of exec sessions
//! ```

use std::path::PathBuf;

use mayfly_runtime::{ContainerId, PodUid};
use sha2::{Digest as _, Sha256};

#[derive(Clone, Debug)]
pub(crate) struct Layout {
    root: PathBuf,
}

impl Layout {
    pub(crate) fn new(root: PathBuf) -> Self {
        Self { root }
    }

    pub(crate) fn daemon(&self) -> PathBuf {
        self.root.join("containerd")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.root.join("containerd.sock")
    }

    pub(crate) fn seccomp(&self) -> PathBuf {
        self.root.join("seccomp")
    }

    pub(crate) fn network(&self) -> PathBuf {
        self.root.join("network")
    }

    pub(crate) fn pods(&self) -> PathBuf {
        self.root.join("pods")
    }

    pub(crate) fn pod(&self, uid: &PodUid) -> PathBuf {
        self.pods().join(&uid.0)
    }

    pub(crate) fn sandbox_file(&self, uid: &PodUid) -> PathBuf {
        self.pod(uid).join("sandbox.json")
    }

    pub(crate) fn namespaces(&self, uid: &PodUid) -> PathBuf {
        self.pod(uid).join("ns")
    }

    pub(crate) fn shared_memory(&self, uid: &PodUid) -> PathBuf {
        self.pod(uid).join("shm")
    }

    pub(crate) fn container(&self, id: &ContainerId) -> PathBuf {
        self.pod(&id.pod).join(format!("{}_{}", id.name, id.attempt))
    }

    pub(crate) fn attach_socket(&self, id: &ContainerId) -> PathBuf {
        self.root.join("s").join(&task_id(id)[..16])
    }

    pub(crate) fn exec(&self) -> PathBuf {
        self.root.join("exec")
    }
}

/// The container's id in containerd, whose length limit is below that of a pod's UID and a container's name.
pub(crate) fn task_id(id: &ContainerId) -> String {
    let mut hash = hex::encode(Sha256::digest(id.to_string()));
    hash.truncate(32);
    hash
}
