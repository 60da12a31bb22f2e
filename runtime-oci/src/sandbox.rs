//! Sandboxes: namespaces, network, the files that every container of a pod sees, and the record of it all on disk.

use std::{fmt::Write as _, fs, io, net::IpAddr, path::Path};

use mayfly_runtime::{NetworkAttachment, PodUid, RuntimeError, SandboxHost, SandboxSpec};
use nix::unistd::gethostname;
use serde::{Deserialize, Serialize};
use tokio::task::spawn_blocking;

use crate::{
    cgroup::PodGroup,
    host::OciHost,
    layout::Layout,
    namespaces::{self, NamespaceSet},
    shared_memory,
};

/// The state of a sandbox that its use and its removal need.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sandbox {
    pub(crate) uid: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) host: SandboxHost,
    pub(crate) reserved: Option<IpAddr>,
    /// Empty until the network is attached.
    pub(crate) addresses: Vec<IpAddr>,
}

impl Sandbox {
    pub(crate) fn uid(&self) -> PodUid {
        PodUid(self.uid.clone())
    }

    /// The pod as upstream names it in messages.
    pub(crate) fn title(&self) -> String {
        format!("{}_{}({})", self.name, self.namespace, self.uid)
    }

    /// Whether its creation was completed.
    pub(crate) fn is_complete(&self) -> bool {
        !self.addresses.is_empty()
    }

    /// Whether its own namespaces exist: a restart of the machine removes them.
    pub(crate) fn has_namespaces(&self, layout: &Layout) -> bool {
        let folder = layout.namespaces(&self.uid());
        let SandboxHost { host_network, host_ipc, .. } = &self.host;
        let own = [("net", !host_network), ("uts", !host_network), ("ipc", !host_ipc)];
        own.iter().all(|(name, is_own)| !is_own || namespaces::is_pinned(&folder.join(name)))
    }

    pub(crate) fn group(&self) -> PodGroup {
        PodGroup::of(&self.uid(), self.host.cgroup.class)
    }

    pub(crate) fn netns(&self, layout: &Layout) -> Option<std::path::PathBuf> {
        (!self.host.host_network).then(|| layout.namespaces(&self.uid()).join("net"))
    }

    fn attachment(&self, layout: &Layout) -> NetworkAttachment {
        NetworkAttachment {
            uid: self.uid(),
            namespace: self.namespace.clone(),
            name: self.name.clone(),
            netns: self.netns(layout),
            reserved: self.reserved,
            host_ports: self.host.host_ports.clone(),
        }
    }

    /// Writes the record atomically. Blocks.
    fn save(&self, layout: &Layout) -> io::Result<()> {
        let path = layout.sandbox_file(&self.uid());
        let folder = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder)?;
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        io::Write::write_all(&mut file, &serde_json::to_vec(self)?)?;
        file.persist(path)?;
        Ok(())
    }

    /// Reads the record. Blocks.
    pub(crate) fn load(path: &Path) -> io::Result<Self> {
        serde_json::from_slice(&fs::read(path)?).map_err(io::Error::from)
    }
}

impl OciHost {
    /// Creates the sandbox; does nothing if it exists.
    pub(crate) async fn make_sandbox(&self, spec: SandboxSpec) -> Result<Vec<IpAddr>, RuntimeError> {
        if let Some(known) = self.sandboxes.lock().get(&spec.uid)
            && known.is_complete()
        {
            return Ok(known.addresses.clone());
        }
        let mut host = spec.host;
        if host.host_network
            && let Ok(name) = gethostname()
        {
            // Such a pod has the host's name, which the variable HOSTNAME contains, too.
            host.hostname = name.to_string_lossy().into_owned();
        }
        if !self.network.assigns_addresses() {
            host.host_network = true;
        }
        let mut sandbox = Sandbox {
            uid: spec.uid.0.clone(),
            namespace: spec.pod.namespace.clone(),
            name: spec.pod.name.clone(),
            host,
            reserved: spec.address,
            addresses: Vec::new(),
        };
        // Registered before anything is created, so that remains of a failure or crash are found again.
        self.sandboxes.lock().insert(spec.uid.clone(), sandbox.clone());
        self.blocking({
            let (sandbox, layout) = (sandbox.clone(), self.layout.clone());
            let program = self.config.program.clone();
            move || {
                sandbox.save(&layout)?;
                sandbox.group().create(&sandbox.host.cgroup)?;
                let wanted = NamespaceSet {
                    network: !sandbox.host.host_network,
                    ipc: !sandbox.host.host_ipc,
                    hostname: sandbox.host.hostname.clone(),
                    processes: sandbox.host.shares_processes.then_some(program),
                };
                namespaces::create(&layout.namespaces(&sandbox.uid()), &wanted)
            }
        })
        .await?;
        sandbox.addresses = match sandbox.host.host_network {
            true => vec![sandbox.reserved.unwrap_or(self.config.host_address)],
            false => {
                let attached = self.network.attach(&sandbox.attachment(&self.layout)).await;
                attached.map_err(|error| RuntimeError::Internal(error.to_string()))?
            }
        };
        self.blocking({
            let (sandbox, layout) = (sandbox.clone(), self.layout.clone());
            move || {
                write_files(&sandbox, &layout.pod(&sandbox.uid()))?;
                sandbox.save(&layout)
            }
        })
        .await?;
        let addresses = sandbox.addresses.clone();
        self.sandboxes.lock().insert(spec.uid, sandbox);
        self.changed();
        Ok(addresses)
    }

    /// Removes the sandbox, whose containers have ended. Completes an interrupted removal.
    pub(crate) async fn drop_sandbox(&self, uid: &PodUid) -> Result<(), RuntimeError> {
        let known = self.sandboxes.lock().get(uid).cloned();
        let Some(sandbox) = known else { return Ok(()) };
        if !sandbox.host.host_network {
            let detached = self.network.detach(&sandbox.attachment(&self.layout)).await;
            detached.map_err(|error| RuntimeError::Internal(error.to_string()))?;
        }
        let layout = self.layout.clone();
        self.blocking(move || {
            let uid = sandbox.uid();
            namespaces::remove(&layout.namespaces(&uid))?;
            shared_memory::remove(&layout.shared_memory(&uid))?;
            sandbox.group().remove();
            match fs::remove_dir_all(layout.pod(&uid)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            }
        })
        .await?;
        self.sandboxes.lock().remove(uid);
        self.changed();
        Ok(())
    }

    /// Runs file and namespace operations on a blocking thread.
    pub(crate) async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<T, RuntimeError> {
        let done = spawn_blocking(work).await.map_err(|error| RuntimeError::Internal(error.to_string()))?;
        done.map_err(|error| match error.kind() {
            io::ErrorKind::StorageFull => RuntimeError::NoRoom("the node's disk is full".into()),
            _ => RuntimeError::Internal(format!("cannot create a sandbox or its files: {error}")),
        })
    }
}

/// `/etc/hosts`, `/etc/hostname` and `/etc/resolv.conf` of the pod.
fn write_files(sandbox: &Sandbox, folder: &Path) -> io::Result<()> {
    let resolv = match &sandbox.host.resolv_conf {
        Some(text) => text.clone(),
        None => fs::read_to_string("/etc/resolv.conf").unwrap_or_default(),
    };
    let hosts = match sandbox.host.host_network {
        true => hosts_of_host(sandbox, &fs::read_to_string("/etc/hosts").unwrap_or_default()),
        false => hosts(sandbox),
    };
    let hostname = match sandbox.host.host_network {
        true => fs::read_to_string("/etc/hostname").unwrap_or_default(),
        false => format!("{}\n", sandbox.host.hostname),
    };
    fs::write(folder.join("hosts"), hosts)?;
    fs::write(folder.join("hostname"), hostname)?;
    fs::write(folder.join("resolv.conf"), resolv)
}

/// The content of `/etc/hosts`, as upstream's kubelet writes it.
fn hosts(sandbox: &Sandbox) -> String {
    let mut text = String::from(
        "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n",
    );
    let SandboxHost { hostname, full_hostname, .. } = &sandbox.host;
    let names = match full_hostname.as_ref().filter(|full| *full != hostname) {
        Some(full) => format!("{full}\t{hostname}"),
        None => hostname.clone(),
    };
    for address in &sandbox.addresses {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{address}\t{names}");
    }
    add_aliases(&mut text, sandbox);
    text
}

/// The content of `/etc/hosts` in the host's network: the host's lines, and the pod's aliases (upstream's
/// `nodeHostsFileContent`).
fn hosts_of_host(sandbox: &Sandbox, text: &str) -> String {
    let mut text = text.to_owned();
    if !sandbox.host.host_aliases.is_empty() {
        text.push_str("\n# Entries added by HostAliases.\n");
        add_aliases(&mut text, sandbox);
    }
    text
}

fn add_aliases(text: &mut String, sandbox: &Sandbox) {
    for (address, names) in &sandbox.host.host_aliases {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{address}\t{}", names.join("\t"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pods_hosts_name_itself_and_its_aliases() {
        let host = SandboxHost {
            hostname: "web".into(),
            host_aliases: vec![("10.0.0.9".parse().unwrap(), vec!["db".into(), "db.local".into()])],
            ..SandboxHost::default()
        };
        let mut sandbox = Sandbox {
            uid: "u".into(),
            namespace: "ns".into(),
            name: "web".into(),
            host,
            reserved: None,
            addresses: vec!["10.212.0.2".parse().unwrap()],
        };
        let text = hosts(&sandbox);
        assert!(text.ends_with("10.212.0.2\tweb\n10.0.0.9\tdb\tdb.local\n"), "{text}");
        let on_host = hosts_of_host(&sandbox, "127.0.0.1 localhost");
        assert!(on_host.starts_with("127.0.0.1 localhost\n"), "{on_host}");
        assert!(on_host.ends_with("\n10.0.0.9\tdb\tdb.local\n"), "{on_host}");
        let mut named = sandbox.clone();
        named.host.full_hostname = Some("web.db.ns.svc.cluster.local".into());
        assert!(hosts(&named).contains("\n10.212.0.2\tweb.db.ns.svc.cluster.local\tweb\n"), "{named:?}");
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout::new(folder.path().into());
        sandbox.save(&layout).unwrap();
        assert_eq!(Sandbox::load(&layout.sandbox_file(&sandbox.uid())).unwrap(), sandbox);
        // After a restart of the machine, the files of the namespaces are ordinary files.
        let pins = layout.namespaces(&sandbox.uid());
        fs::create_dir_all(&pins).unwrap();
        ["net", "uts", "ipc"].iter().for_each(|name| fs::write(pins.join(name), "").unwrap());
        assert!(!sandbox.has_namespaces(&layout));
        sandbox.host.host_network = true;
        assert!(!sandbox.has_namespaces(&layout), "its IPC namespace is its own");
        sandbox.host.host_ipc = true;
        assert!(sandbox.has_namespaces(&layout));
    }
}
