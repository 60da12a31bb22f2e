//! A sandbox's kernel namespaces: created on a separate thread and pinned by bind mounts, so that they need no process
//! (no pause container) and outlive this process. Only a process namespace that containers share needs one
//! ([`pod_init`]).

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
    sys::statfs::{NSFS_MAGIC, statfs},
    unistd::sethostname,
};

use crate::pod_init;

/// The namespaces that a pod's containers share, by their names in `/proc/PID/ns`.
const SHARED: [(&str, CloneFlags); 3] =
    [("net", CloneFlags::CLONE_NEWNET), ("ipc", CloneFlags::CLONE_NEWIPC), ("uts", CloneFlags::CLONE_NEWUTS)];

/// The file of the process namespace that the containers of a pod share.
pub(crate) const PROCESSES: &str = "pid";

/// The timeout for connecting to a port of a pod.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The namespaces that a pod does not share with the host.
#[derive(Clone, Debug)]
pub(crate) struct NamespaceSet {
    pub(crate) network: bool,
    pub(crate) ipc: bool,
    pub(crate) hostname: String,
    /// The program whose command `pod-init` is the first process of a shared process namespace.
    pub(crate) processes: Option<PathBuf>,
}

impl NamespaceSet {
    fn has(&self, name: &str) -> bool {
        match name {
            "net" => self.network,
            "ipc" => self.ipc,
            // A pod in the host's network has the host's name.
            _ => self.network,
        }
    }
}

/// Creates and pins the namespaces in `folder`; existing pins are kept. Blocks.
pub(crate) fn create(folder: &Path, wanted: &NamespaceSet) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let missing: Vec<_> =
        SHARED.into_iter().filter(|(name, _)| wanted.has(name) && !is_pinned(&folder.join(name))).collect();
    let init = wanted.processes.clone().filter(|_| !is_pinned(&folder.join(PROCESSES)));
    if missing.is_empty() && init.is_none() {
        return Ok(());
    }
    for name in missing.iter().map(|(name, _)| *name).chain(init.as_ref().map(|_| PROCESSES)) {
        fs::write(folder.join(name), "")?;
    }
    let (folder, hostname) = (folder.to_owned(), wanted.hostname.clone());
    // The thread cannot leave the new namespaces, so it ends here.
    let made = thread::Builder::new().name("sandbox".into()).spawn(move || -> io::Result<()> {
        let flags = missing.iter().fold(CloneFlags::empty(), |all, (_, flag)| all | *flag);
        unshare(flags)?;
        if flags.contains(CloneFlags::CLONE_NEWUTS) && !hostname.is_empty() {
            sethostname(&hostname)?;
        }
        if flags.contains(CloneFlags::CLONE_NEWNET) {
            // The node assigns each address once. Duplicate address detection would delay the pod's start by a second
            // or two. A kernel without IPv6 has no such file.
            let _ = fs::write("/proc/sys/net/ipv6/conf/default/accept_dad", "0");
        }
        let pin = |source: &Path, name: &str| {
            mount(Some(source), &folder.join(name), None::<&str>, MsFlags::MS_BIND, None::<&str>)
        };
        for (name, _) in missing {
            pin(&Path::new("/proc/thread-self/ns").join(name), name)?;
        }
        if let Some(program) = init {
            // The thread stays in its namespace; its next child is the first process of the new one.
            unshare(CloneFlags::CLONE_NEWPID)?;
            let first = pod_init::start(&program, &folder)?;
            pin(Path::new(&format!("/proc/{first}/ns/pid")), PROCESSES)?;
        }
        Ok(())
    })?;
    made.join().map_err(|_| io::Error::other("the thread that makes namespaces panicked"))?
}

/// Unpins all namespaces in `folder`, and removes it. Blocks.
pub(crate) fn remove(folder: &Path) -> io::Result<()> {
    if folder.join(PROCESSES).exists() {
        pod_init::end(folder)?;
    }
    for name in SHARED.iter().map(|(name, _)| *name).chain([PROCESSES]) {
        let path = folder.join(name);
        // An interrupted start may have pinned it twice.
        while is_pinned(&path) {
            umount2(&path, MntFlags::MNT_DETACH)?;
        }
    }
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Whether a namespace is mounted at the path: the file is then on the kernel's `nsfs`.
pub(crate) fn is_pinned(path: &Path) -> bool {
    statfs(path).is_ok_and(|found| found.filesystem_type() == NSFS_MAGIC)
}

/// Connects to a port on a loopback address of a network namespace (`None`: the host's): that of IPv4, or else that of
/// IPv6, as containerd does. Blocks.
pub(crate) fn connect(netns: Option<&Path>, port: u16) -> io::Result<TcpStream> {
    let Some(netns) = netns else { return connect_loopback(port) };
    let namespace = fs::File::open(netns)?;
    // A socket stays in the namespace in which it was created; the thread ends, since it cannot leave the namespace.
    let connected = thread::Builder::new().name("port-forward".into()).spawn(move || {
        setns(namespace.as_fd(), CloneFlags::CLONE_NEWNET)?;
        connect_loopback(port)
    })?;
    connected.join().map_err(|_| io::Error::other("the connecting thread panicked"))?
}

/// Some programs listen on `localhost` in one address family only.
fn connect_loopback(port: u16) -> io::Result<TcpStream> {
    let connect =
        |address: IpAddr| TcpStream::connect_timeout(&SocketAddr::new(address, port), CONNECT_TIMEOUT);
    // The first error is the one to report: a kernel may have no IPv6.
    connect(Ipv4Addr::LOCALHOST.into())
        .or_else(|error| connect(Ipv6Addr::LOCALHOST.into()).map_err(|_| error))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_port_is_reached_in_either_address_family() {
        let listener = match TcpListener::bind((Ipv6Addr::LOCALHOST, 0)) {
            Ok(listener) => listener,
            Err(error) => {
                return eprintln!("SKIPPED a_port_is_reached_in_either_address_family: no IPv6: {error}");
            }
        };
        let address = listener.local_addr().unwrap();
        assert_eq!(connect(None, address.port()).unwrap().peer_addr().unwrap(), address);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        assert_eq!(connect(None, address.port()).unwrap().peer_addr().unwrap(), address);
    }
}
