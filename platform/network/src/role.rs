//! The service proxy of a node: follows Services and EndpointSlices and carries the plan out.

use std::{net::IpAddr, sync::Arc, time::Duration};

use mayfly_api::k8s::api::{core::v1::Service, discovery::v1::EndpointSlice};
use mayfly_informer::{Changes, Informer, Informers};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::{nftables::NftablesProxy, plan, plan::RuleSet, userspace::UserspaceProxy};

/// Changes within this time are carried out together: endpoints of a rollout change in bursts.
const GATHER: Duration = Duration::from_millis(5);
/// How often rules that failed are tried again, and the kernel's tables are looked at.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// How Services are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyMode {
    /// In the kernel, with root.
    Nftables,
    /// By listeners of this process; node ports on this address.
    Userspace(IpAddr),
}

/// The proxy, created and not yet running. A handle to its rules is [`ServiceProxy::rules`].
pub struct ServiceProxy {
    mode: ProxyMode,
    node: String,
    services: Informer<Service>,
    slices: Informer<EndpointSlice>,
    rules: watch::Sender<Arc<RuleSet>>,
}

enum Proxy {
    Nftables(NftablesProxy),
    Userspace(UserspaceProxy),
}

impl ServiceProxy {
    #[must_use]
    pub fn create(mode: ProxyMode, node: &str, informers: &Informers) -> Self {
        let rules = watch::Sender::new(Arc::new(RuleSet::default()));
        Self { mode, node: node.to_owned(), services: informers.of(), slices: informers.of(), rules }
    }

    /// The rules that were planned last.
    #[must_use]
    pub fn rules(&self) -> watch::Receiver<Arc<RuleSet>> {
        self.rules.subscribe()
    }

    /// Runs until `stop`; then listeners are closed, or the kernel's tables removed.
    pub async fn run(self, stop: CancellationToken) {
        let mut proxy = match self.mode {
            ProxyMode::Nftables => Proxy::Nftables(NftablesProxy::default()),
            ProxyMode::Userspace(address) => Proxy::Userspace(UserspaceProxy::new(address)),
        };
        let synced = async { tokio::join!(self.services.synced(), self.slices.synced()) };
        if stop.run_until_cancelled(synced).await.is_none() {
            return;
        }
        let mut services = self.services.subscribe();
        let mut slices = self.slices.subscribe();
        let mut failing = false;
        loop {
            let rules = Arc::new(self.plan());
            let failure = proxy.apply(&rules).await;
            match &failure {
                Some(failure) if !failing => {
                    tracing::warn!(failure, "services cannot all be served; trying again")
                }
                None if failing => tracing::info!("all services are served again"),
                _ => {}
            }
            failing = failure.is_some();
            self.rules.send_replace(rules);
            if stop.run_until_cancelled(changed(&mut services, &mut slices)).await.is_none() {
                break;
            }
        }
        if let Proxy::Nftables(proxy) = &mut proxy
            && let Err(error) = proxy.remove().await
        {
            tracing::warn!(%error, "the service rules of the kernel could not be removed");
        }
    }

    fn plan(&self) -> RuleSet {
        let (services, slices) = (self.services.list(), self.slices.list());
        plan::plan(services.iter().map(|service| &**service), slices.iter().map(|slice| &**slice), &self.node)
    }
}

/// Waits for changes, or for the time of a check.
async fn changed(services: &mut Changes, slices: &mut Changes) {
    let check = Instant::now() + CHECK_INTERVAL;
    tokio::select! {
        _ = services.next() => {}
        _ = slices.next() => {}
        () = tokio::time::sleep_until(check) => return,
    }
    tokio::time::sleep(GATHER).await;
    services.take();
    slices.take();
}

impl Proxy {
    /// Carries rules out; says what could not be.
    async fn apply(&mut self, rules: &RuleSet) -> Option<String> {
        match self {
            Self::Nftables(proxy) => {
                match proxy.apply(rules).await {
                    Ok(true) => {
                        tracing::warn!(
                            "the kernel's service rules were changed by another program; they are back"
                        );
                    }
                    Ok(false) => {}
                    Err(error) => return Some(error.to_string()),
                }
                None
            }
            Self::Userspace(proxy) => {
                let failed = proxy.apply(rules).await;
                let first = failed.first()?;
                Some(match failed.len() {
                    1 => first.to_string(),
                    count => format!("{first} (and {} more)", count - 1),
                })
            }
        }
    }
}
