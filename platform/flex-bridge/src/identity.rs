//! The identity service, and the registration with the kubelet.

use mayfly_csi::{
    proto::{
        GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest,
        GetPluginInfoResponse, OptionalBool, PluginCapability, ProbeRequest, ProbeResponse,
        identity_server::Identity,
        plugin_capability::{self, Service, service},
    },
    registration::{
        InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
        registration_server::Registration,
    },
};
use tonic::{Request, Response, Status};

use crate::Bridge;

#[tonic::async_trait]
impl Identity for Bridge {
    async fn get_plugin_info(
        &self,
        _request: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        Ok(Response::new(GetPluginInfoResponse {
            name: self.config.name.clone(),
            vendor_version: env!("CARGO_PKG_VERSION").into(),
            manifest: Default::default(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _request: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        let controller = Service { r#type: service::Type::ControllerService.into() };
        let capability = PluginCapability { r#type: Some(plugin_capability::Type::Service(controller)) };
        Ok(Response::new(GetPluginCapabilitiesResponse { capabilities: vec![capability] }))
    }

    /// Calls `init` if it was not called since the program was installed.
    async fn probe(&self, _request: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        let found = self.driver.capabilities().await;
        found.map_err(|error| Status::failed_precondition(error.to_string()))?;
        Ok(Response::new(ProbeResponse { ready: Some(OptionalBool { value: true }) }))
    }
}

#[tonic::async_trait]
impl Registration for Bridge {
    async fn get_info(&self, _request: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "CSIPlugin".into(),
            name: self.config.name.clone(),
            endpoint: self.config.endpoint.to_string_lossy().into_owned(),
            supported_versions: vec!["1.0.0".into()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        match status.plugin_registered {
            true => tracing::info!(driver = self.config.name, "the kubelet has registered the driver"),
            false => {
                tracing::warn!(driver = self.config.name, status.error, "the kubelet refused the driver")
            }
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
