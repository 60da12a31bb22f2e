//! The gateway role: created, run, drained.

use std::{io, net::SocketAddr, sync::Arc};

use arc_swap::ArcSwap;
use http::{Request, Response};
use mayfly_api::{
    Function, ObjectKey, Revision,
    k8s::api::{
        core::v1::{Pod, Secret, Service},
        discovery::v1::EndpointSlice,
        networking::v1::Ingress,
    },
};
use mayfly_informer::{EnvObjects, Informer};
use mayfly_runtime::{Body, FunctionHost};
use prometheus_client::registry::Registry;
use rustls::server::ResolvesServerCert;
use tokio::{net::TcpListener, sync::watch, task::JoinSet};
use tokio_util::{
    sync::CancellationToken,
    task::{AbortOnDropHandle, TaskTracker},
};

use crate::{
    Config, InvocationQueue, Refusal, ResponseBody,
    autoscale::Autoscaler,
    function_services::{FunctionServices, ServicePorts},
    headers::Entrance,
    ingress::{
        certificates::{CertificateOwner, Certificates},
        forward::EndpointForwarder,
        owner::IngressOwner,
    },
    listen,
    metrics::{GatewayCollector, GatewayCounts},
    nodes::{GatewayRole, NodeRequests, load::LoadReader},
    proxy::Proxy,
    routes::{
        Owner, RouteTable,
        owner::{OwnerDeps, RouteSources},
    },
    target::{DemandSignal, Targets},
};

/// The dependencies of the gateway.
pub struct GatewayDeps {
    pub functions: Informer<Function>,
    pub revisions: Informer<Revision>,
    /// The role in the cluster, and the connections to the other gateways.
    pub role: GatewayRole,
    /// Replicas of revisions.
    pub pods: Informer<Pod>,
    /// Used for Services over functions, which are served here.
    pub services: Informer<Service>,
    /// Backends of Ingresses.
    pub slices: Informer<EndpointSlice>,
    pub ingresses: Informer<Ingress>,
    /// `None`: nothing answers over TLS.
    pub https: Option<HttpsDeps>,
    /// The sources of environment variables.
    pub env: EnvObjects,
    /// Runs functions in this process.
    pub host: Arc<dyn FunctionHost>,
    /// Writes `replicas` of revisions' ReplicaSets, EndpointSlices of Services over functions and statuses of Ingresses.
    /// No request waits for it. A follower does not use it.
    pub client: kube::Client,
    /// The Tokio runtime that serves requests. It has its own threads, so that the rest of the process does not delay
    /// requests; routes and replicas are managed in the runtime that polls [`Gateway::run`].
    pub requests: tokio::runtime::Handle,
    /// Ends [`Gateway::run`] after a drain; [`GatewayHandle::call`] refuses requests at once.
    pub stop: CancellationToken,
}

impl std::fmt::Debug for GatewayDeps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GatewayDeps").finish_non_exhaustive()
    }
}

/// The dependencies of TLS.
pub struct HttpsDeps {
    /// The address for functions and Ingresses over TLS. Port 0 selects a free port.
    pub listen: SocketAddr,
    /// The certificates of Ingresses.
    pub secrets: Informer<Secret>,
    /// The certificate for names without one of their own.
    pub fallback: Arc<dyn ResolvesServerCert>,
}

impl std::fmt::Debug for HttpsDeps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpsDeps").field("listen", &self.listen).finish_non_exhaustive()
    }
}

/// The TLS listener, with its port bound.
struct Https {
    listener: TcpListener,
    address: SocketAddr,
    entrance: Entrance,
    certificates: CertificateOwner,
}

impl Https {
    fn create(
        deps: HttpsDeps,
        ingresses: Informer<Ingress>,
        requests: &tokio::runtime::Handle,
    ) -> Result<Self, GatewayCreateError> {
        let HttpsDeps { listen, secrets, fallback } = deps;
        let refused = |source| GatewayCreateError::ListenTls { address: listen, source };
        let listener = {
            let _in_requests = requests.enter();
            listen::bind(listen).map_err(refused)?
        };
        let address = listener.local_addr().map_err(refused)?;
        let certificates = Arc::new(Certificates::new(fallback));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(GatewayCreateError::Tls)?;
        let mut config = config.with_no_client_auth().with_cert_resolver(certificates.clone());
        config.alpn_protocols = vec![listen::ALPN_H2.to_vec(), listen::ALPN_HTTP1.to_vec()];
        let entrance = Entrance::of_tls(Arc::new(config));
        Ok(Self {
            listener,
            address,
            entrance,
            certificates: CertificateOwner { ingresses, secrets, certificates },
        })
    }
}

/// The reason why the gateway could not be created.
#[derive(Debug, thiserror::Error)]
pub enum GatewayCreateError {
    #[error("cannot listen on {address} for functions: {source}")]
    Listen { address: SocketAddr, source: io::Error },
    #[error("cannot listen on {address} for functions over TLS: {source}")]
    ListenTls { address: SocketAddr, source: io::Error },
    #[error("TLS cannot be set up: {0}")]
    Tls(rustls::Error),
}

/// The result of the drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// Every request was answered.
    Clean,
    /// The drain timeout expired, and the remaining requests were cancelled.
    Cut,
}

/// The gateway, with its port bound.
pub struct Gateway {
    config: Config,
    listener: TcpListener,
    function_services: FunctionServices,
    ingress_owner: IngressOwner,
    https: Option<Https>,
    /// Cancels the requests that are left after the drain.
    cut: CancellationToken,
    address: SocketAddr,
    proxy: Arc<Proxy>,
    targets: Arc<Targets>,
    owner: Owner,
    scaling: Option<ScalingTasks>,
    ready: watch::Sender<bool>,
    applied: watch::Receiver<u64>,
    requests: tokio::runtime::Handle,
    stop: CancellationToken,
}

impl std::fmt::Debug for Gateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gateway").field("address", &self.address).finish_non_exhaustive()
    }
}

/// The tasks that decide the numbers of replicas. A follower has none.
struct ScalingTasks {
    autoscaler: Autoscaler,
    /// Reads the load of followers.
    loads: Option<LoadReader>,
}

/// Calls functions from other parts of the process. Cheap to clone.
#[derive(Clone)]
pub struct GatewayHandle {
    proxy: Arc<Proxy>,
    targets: Arc<Targets>,
    ready: watch::Receiver<bool>,
    applied: watch::Receiver<u64>,
    address: SocketAddr,
    stop: CancellationToken,
}

impl std::fmt::Debug for GatewayHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GatewayHandle").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Gateway {
    /// Binds the ports and subscribes to the objects that routes are made from.
    pub fn create(
        config: Config,
        deps: GatewayDeps,
        registry: &mut Registry,
    ) -> Result<Self, GatewayCreateError> {
        let GatewayDeps {
            functions,
            revisions,
            role,
            pods,
            services,
            slices,
            ingresses,
            https,
            env,
            host,
            client,
            requests,
            stop,
        } = deps;
        let refused = |source| GatewayCreateError::Listen { address: config.listen, source };
        let listener = {
            let _in_requests = requests.enter();
            listen::bind(config.listen).map_err(refused)?
        };
        let address = listener.local_addr().map_err(refused)?;

        let table = Arc::new(RouteTable::new());
        let targets = Arc::new(Targets::default());
        let counts = Arc::new(GatewayCounts::default());
        let (peers, tracking) = role.parts(&counts);
        let follows = peers.is_follower();
        let demand = Arc::new(if follows { DemandSignal::ignored() } else { DemandSignal::default() });
        let collector = GatewayCollector { targets: targets.clone(), counts: counts.clone() };
        registry.register_collector(Box::new(collector));

        let objects = RouteSources { functions, revisions, pods, env };
        let applied = watch::Sender::new(0);
        let parts = OwnerDeps {
            host,
            table: table.clone(),
            targets: targets.clone(),
            demand: demand.clone(),
            counts: counts.clone(),
            queue_max: config.queue_max,
            tracking,
            applied: applied.clone(),
        };
        let owner = Owner::new(objects, parts);
        let scaling = (!follows).then(|| ScalingTasks {
            autoscaler: Autoscaler::new(client.clone(), demand.clone(), counts.clone()),
            loads: peers.nodes().map(|nodes| LoadReader {
                nodes: nodes.clone(),
                targets: targets.clone(),
                demand: demand.clone(),
            }),
        });
        let ports = match follows {
            true => ServicePorts::Read(slices.clone()),
            false => ServicePorts::Written(client.clone()),
        };
        let cut = CancellationToken::new();
        let https = https.map(|https| Https::create(https, ingresses.clone(), &requests)).transpose()?;
        let ingress = Arc::new(ArcSwap::default());
        let status_client = (!follows).then_some(client);
        let ingress_owner =
            IngressOwner::new(ingresses, services.clone(), slices, ingress.clone(), status_client, address);
        let queue = peers.leader().map(|leader| leader.clone() as Arc<dyn InvocationQueue>);
        let proxy = Arc::new(Proxy {
            table,
            ingress,
            forwarder: Arc::new(EndpointForwarder::new(cut.clone())),
            demand,
            counts,
            request_bytes_max: config.request_bytes_max,
            stall_timeout: config.stall_timeout,
            trust_forwarded: config.trust_forwarded,
            peers,
            queue,
        });
        let ready = watch::Sender::new(false);
        let applied = applied.subscribe();
        let function_services = FunctionServices {
            services,
            ports,
            proxy: proxy.clone(),
            config: config.clone(),
            requests: requests.clone(),
            drain: stop.clone(),
            cut: cut.clone(),
            serving: TaskTracker::new(),
        };
        Ok(Self {
            config,
            listener,
            function_services,
            ingress_owner,
            https,
            cut,
            address,
            proxy,
            targets,
            owner,
            scaling,
            ready,
            applied,
            requests,
            stop,
        })
    }

    /// The same gateway with a queue of asynchronous invocations. Without one they are refused; so they are by handles
    /// made before, by which the queue itself calls functions. A follower uses the leader's queue.
    #[must_use]
    pub fn with_invocations(self, queue: Arc<dyn InvocationQueue>) -> Self {
        let proxy = Arc::new(Proxy { queue: Some(queue), ..(*self.proxy).clone() });
        let function_services = FunctionServices { proxy: proxy.clone(), ..self.function_services };
        Self { proxy, function_services, ..self }
    }

    /// The address of the listener, with the actual port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The address of the TLS listener, if there is one.
    pub fn https_address(&self) -> Option<SocketAddr> {
        self.https.as_ref().map(|https| https.address)
    }

    pub fn handle(&self) -> GatewayHandle {
        GatewayHandle {
            proxy: self.proxy.clone(),
            targets: self.targets.clone(),
            ready: self.ready.subscribe(),
            applied: self.applied.clone(),
            address: self.address,
            stop: self.stop.clone(),
        }
    }

    /// Serves until `GatewayDeps::stop`, then lets requests in flight finish within the drain timeout.
    pub async fn run(self) -> Drained {
        let Self {
            config,
            listener,
            function_services,
            ingress_owner,
            https,
            cut,
            address,
            proxy,
            targets,
            owner,
            scaling,
            ready,
            requests,
            stop,
            ..
        } = self;
        tracing::info!(%address, "serving functions");
        // Routes and replicas are managed until the last request is answered.
        let background_stop = CancellationToken::new();
        let mut background = JoinSet::new();
        background.spawn(owner.run(ready, background_stop.clone()));
        if let Some(ScalingTasks { autoscaler, loads }) = scaling {
            background.spawn(autoscaler.run(background_stop.clone()));
            if let Some(loads) = loads {
                background.spawn(loads.run(background_stop.clone()));
            }
        }

        let others = function_services.serving.clone();
        background.spawn(function_services.run(stop.clone()));
        background.spawn(ingress_owner.run(background_stop.clone()));
        let drain_timeout = config.drain_timeout;
        let over_tls = https.map(|Https { listener, address, entrance, certificates }| {
            tracing::info!(%address, "serving functions and Ingresses over TLS");
            background.spawn(certificates.run(background_stop.clone()));
            listen::serve(listener, proxy.clone(), config.clone(), entrance, stop.clone(), cut.clone())
        });
        let serving = listen::serve(listener, proxy, config, Entrance::HTTP, stop.clone(), cut.clone());
        let stopped = stop.clone();
        let others = async move {
            stopped.cancelled().await;
            others.close();
            others.wait().await;
        };
        let serving = async move {
            let over_tls = async {
                if let Some(over_tls) = over_tls {
                    over_tls.await;
                }
            };
            tokio::join!(serving, over_tls, others);
        };
        let mut serving = AbortOnDropHandle::new(requests.spawn(serving));
        let deadline = async {
            stop.cancelled().await;
            let requests = targets.requests();
            if requests > 0 {
                let at_most_s = drain_timeout.as_secs();
                tracing::info!(requests, at_most_s, "waiting for running requests");
            }
            tokio::time::sleep(drain_timeout).await;
        };
        // Both tasks run until the shutdown; if one fails, the existing routes are still served.
        let failure = async {
            while let Some(ended) = background.join_next().await {
                if let Err(error) = ended {
                    tracing::error!(%error, "a task of the gateway failed: routes or replicas are not updated any more");
                }
            }
            std::future::pending::<()>().await;
        };
        let (drained, served) = tokio::select! {
            () = failure => unreachable!("it never ends"),
            served = &mut serving => (Drained::Clean, served),
            () = deadline => {
                cut.cancel();
                (Drained::Cut, serving.await)
            }
        };
        if let Err(error) = served {
            tracing::error!(%error, "serving functions failed");
        }
        background_stop.cancel();
        while background.join_next().await.is_some() {}
        let requests = match drained {
            Drained::Clean => "all answered",
            Drained::Cut => "some cancelled",
        };
        tracing::info!(%address, requests, "stopped serving functions");
        drained
    }
}

impl GatewayHandle {
    /// Calls a function with the same rules as a request from a socket: traffic, admission, timeouts. The function sees
    /// the request's URI unchanged. Dropping the future, or the response's body, cancels the call.
    pub async fn call(
        &self,
        namespace: &str,
        name: &str,
        request: Request<Body>,
    ) -> Result<Response<ResponseBody>, Refusal> {
        if self.stop.is_cancelled() {
            return Err(Refusal::shutting_down());
        }
        self.proxy.ask(&format!("{namespace}/{name}"), request).await
    }

    /// The receiving side of the requests of other nodes' gateways, to be served on an authenticated port: of a follower
    /// for the leader, of the leader for followers.
    pub fn node_requests(&self) -> NodeRequests {
        let instance = format!("{:016x}", rand::random::<u64>()).into();
        let (proxy, targets) = (self.proxy.clone(), self.targets.clone());
        NodeRequests::new(proxy, targets, self.applied.clone(), self.stop.clone(), instance)
    }

    /// Checks whether a request for this function could be routed, without calling it. Returns the refusal otherwise.
    pub fn find(&self, namespace: &str, name: &str) -> Result<(), Refusal> {
        self.proxy.find(&format!("{namespace}/{name}"))
    }

    /// Whether requests for a function are routed by this version of it or a later one. `latest`: the revision that its
    /// target `latest: true` resolves to.
    pub fn follows(&self, function: &Function, latest: Option<&str>) -> bool {
        let route = self.proxy.table.function(&ObjectKey::of(function).to_string());
        route.is_some_and(|route| route.follows(function, latest))
    }

    /// Changes whenever the routes have changed. The value itself has no meaning.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.applied.clone()
    }

    /// Waits until all functions that existed at the start have their routes.
    pub async fn ready(&self) {
        // Fails only when the gateway has ended; then there is nothing to wait for.
        let _ = self.ready.clone().wait_for(|ready| *ready).await;
    }

    pub fn is_ready(&self) -> bool {
        *self.ready.borrow()
    }

    /// The address of the listener.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}
