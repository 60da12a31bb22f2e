//! The `/etc/resolv.conf` of a pod. Pure, except for [`behind_stub`].

use std::{fs, net::IpAddr, path::Path};

use mayfly_api::k8s::api::core::v1::PodSpec;

/// The number of name servers in one file, a limit of the C library and of upstream's validation.
const NAME_SERVERS_MAX: usize = 3;
/// Names with at least this many dots are tried as absolute names first: upstream's value, so that
/// `service.namespace.svc` uses the search list.
const CLUSTER_NDOTS: &str = "ndots:5";

/// The host's file.
pub(super) const HOST_FILE: &str = "/etc/resolv.conf";
/// The file of systemd-resolved with the servers that it asks.
pub(super) const RESOLVED_FILE: &str = "/run/systemd/resolve/resolv.conf";

/// The cluster's name server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterDnsServer {
    pub address: IpAddr,
    /// Such as `cluster.local`.
    pub domain: String,
}

/// The lines of a `resolv.conf` that are used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ResolvConf {
    servers: Vec<String>,
    searches: Vec<String>,
    options: Vec<String>,
}

impl ResolvConf {
    fn parse(text: &str) -> Self {
        let mut parsed = Self::default();
        for line in text.lines() {
            let mut words = line.split_whitespace().map(str::to_owned);
            match words.next().as_deref() {
                Some("nameserver") => parsed.servers.extend(words.next()),
                // The last line wins.
                Some("search" | "domain") => parsed.searches = words.collect(),
                Some("options") => parsed.options.extend(words),
                _ => {}
            }
        }
        parsed
    }

    /// Whether a pod with its own network reaches a server: the host's loopback addresses are not the pod's.
    fn is_reachable(&self) -> bool {
        let is_loopback = |server: &String| server.parse().is_ok_and(|address: IpAddr| address.is_loopback());
        self.servers.iter().any(|server| !is_loopback(server))
    }

    fn render(mut self) -> String {
        let mut text = String::new();
        self.servers.truncate(NAME_SERVERS_MAX);
        for server in &self.servers {
            text.push_str(&format!("nameserver {server}\n"));
        }
        for (word, list) in [("search", &self.searches), ("options", &self.options)] {
            if !list.is_empty() {
                text.push_str(&format!("{word} {}\n", list.join(" ")));
            }
        }
        text
    }

    fn add_new(list: &mut Vec<String>, more: impl IntoIterator<Item = String>) {
        for one in more {
            if !list.contains(&one) {
                list.push(one);
            }
        }
    }
}

/// The file of a pod in `namespace` by its `dnsPolicy` and `dnsConfig`; `None`: the host's file unchanged. Without a
/// cluster name server `ClusterFirst` behaves as `Default`. `host` returns the text of the host's file.
pub(super) fn resolv_conf(
    spec: &PodSpec,
    namespace: &str,
    cluster: Option<&ClusterDnsServer>,
    host: impl FnOnce() -> String,
) -> Option<String> {
    let in_host_network = spec.host_network == Some(true);
    let base = match (spec.dns_policy.as_deref(), cluster) {
        (Some("None"), _) => Some(ResolvConf::default()),
        (Some("Default"), _) | (_, None) => None,
        // As upstream: a pod in the host's network uses cluster DNS only with `ClusterFirstWithHostNet`.
        (Some("ClusterFirst") | None, _) if in_host_network => None,
        (_, Some(cluster)) => {
            let ClusterDnsServer { address, domain } = cluster;
            let host = ResolvConf::parse(&host());
            let mut searches =
                vec![format!("{namespace}.svc.{domain}"), format!("svc.{domain}"), domain.clone()];
            ResolvConf::add_new(&mut searches, host.searches);
            let conf = ResolvConf {
                servers: vec![address.to_string()],
                searches,
                options: vec![CLUSTER_NDOTS.to_owned()],
            };
            return Some(with_config(conf, spec).render());
        }
    };
    match base {
        Some(none) => Some(with_config(none, spec).render()),
        None => spec.dns_config.is_some().then(|| with_config(ResolvConf::parse(&host()), spec).render()),
    }
}

/// The text of `resolved`, if the servers of `host` are on loopback addresses only and `resolved` has others: such a
/// host runs systemd-resolved, whose own address pods with their own network do not reach. (kubeadm configures
/// upstream's kubelet accordingly.) Blocks.
pub(super) fn behind_stub(host: &Path, resolved: &Path) -> Option<String> {
    let own = ResolvConf::parse(&fs::read_to_string(host).ok()?);
    if own.servers.is_empty() || own.is_reachable() {
        return None;
    }
    fs::read_to_string(resolved).ok().filter(|text| ResolvConf::parse(text).is_reachable())
}

/// Merges a pod's `dnsConfig`: servers and searches are added, options replace those of the same name.
fn with_config(mut conf: ResolvConf, spec: &PodSpec) -> ResolvConf {
    let Some(config) = &spec.dns_config else { return conf };
    ResolvConf::add_new(&mut conf.servers, config.nameservers.iter().flatten().cloned());
    ResolvConf::add_new(&mut conf.searches, config.searches.iter().flatten().cloned());
    for option in config.options.iter().flatten() {
        let Some(name) = &option.name else { continue };
        conf.options.retain(|known| known.split(':').next() != Some(name.as_str()));
        conf.options.push(match &option.value {
            Some(value) => format!("{name}:{value}"),
            None => name.clone(),
        });
    }
    conf
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_servers_behind_a_stub_are_used() {
        let folder = tempfile::tempdir().unwrap();
        let (host, resolved) = (folder.path().join("host"), folder.path().join("resolved"));
        let servers = "nameserver 192.0.2.1\nsearch corp.example\n";
        for (own, other, expected) in [
            ("nameserver 127.0.0.53\noptions edns0\n", Some(servers), Some(servers)),
            ("nameserver 127.0.0.53\n", Some("nameserver ::1\n"), None),
            ("nameserver 127.0.0.53\n", None, None),
            ("nameserver 127.0.0.1\nnameserver 192.0.2.9\n", Some(servers), None),
            ("", Some(servers), None),
        ] {
            fs::write(&host, own).unwrap();
            let _ = fs::remove_file(&resolved);
            if let Some(text) = other {
                fs::write(&resolved, text).unwrap();
            }
            assert_eq!(behind_stub(&host, &resolved).as_deref(), expected, "{own}");
        }
    }

    const HOST: &str = "# by hand\nnameserver 192.0.2.1\nsearch corp.example\noptions edns0\n";

    #[test]
    fn each_policy_has_its_file() {
        let cluster = ClusterDnsServer { address: [10, 96, 0, 10].into(), domain: "cluster.local".into() };
        let in_cluster = "nameserver 10.96.0.10\nsearch shop.svc.cluster.local svc.cluster.local cluster.local corp.example\n\
                          options ndots:5\n";
        let config = json!({"nameservers": ["192.0.2.9", "192.0.2.1"], "searches": ["x.y"],
            "options": [{"name": "ndots", "value": "2"}, {"name": "rotate"}]});
        let with = |policy: &str, config: &Value| json!({"containers": [], "dnsPolicy": policy, "dnsConfig": config});
        let host_network = |policy: &str| json!({"containers": [], "dnsPolicy": policy, "hostNetwork": true});
        for (spec, expected) in [
            (json!({"containers": []}), Some(in_cluster.to_owned())),
            (json!({"containers": [], "dnsPolicy": "ClusterFirst"}), Some(in_cluster.to_owned())),
            (host_network("ClusterFirst"), None),
            (host_network("ClusterFirstWithHostNet"), Some(in_cluster.to_owned())),
            (json!({"containers": [], "dnsPolicy": "Default"}), None),
            (
                with("None", &config),
                Some("nameserver 192.0.2.9\nnameserver 192.0.2.1\nsearch x.y\noptions ndots:2 rotate\n".to_owned()),
            ),
            (
                with("Default", &config),
                Some(
                    "nameserver 192.0.2.1\nnameserver 192.0.2.9\nsearch corp.example x.y\noptions edns0 ndots:2 rotate\n"
                        .to_owned(),
                ),
            ),
            (
                with("ClusterFirst", &json!({"options": [{"name": "ndots", "value": "1"}]})),
                Some(in_cluster.replace("ndots:5", "ndots:1")),
            ),
        ] {
            let pod: PodSpec = serde_json::from_value(spec.clone()).unwrap();
            assert_eq!(resolv_conf(&pod, "shop", Some(&cluster), || HOST.to_owned()), expected, "{spec}");
        }
        let pod: PodSpec = serde_json::from_value(json!({"containers": []})).unwrap();
        assert_eq!(resolv_conf(&pod, "shop", None, || HOST.to_owned()), None, "no cluster name server");
    }
}
