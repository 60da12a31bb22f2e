//! The API over TLS.

use std::sync::Arc;

use hyper_util::service::TowerToHyperService;
use mayfly_accept::{AcceptPort, ProgressBody};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::server::ApiServer;

impl ApiServer {
    /// Serves until `stop` is cancelled, then ends watches and lets requests finish, for the drain timeout at most.
    pub async fn serve(
        &self,
        listener: TcpListener,
        tls: Arc<rustls::ServerConfig>,
        stop: CancellationToken,
    ) {
        let config = &self.inner.config;
        let port = AcceptPort::new("api", config.connections.clone(), &config.connection_metrics);
        let service = TowerToHyperService::new(self.service::<ProgressBody>());
        let serving = port.serve(listener, Some(tls), service, stop.clone());
        let watches = async {
            stop.cancelled().await;
            self.shut_down();
        };
        tokio::join!(serving, watches);
    }
}
