//! Calls of plugins, each with a deadline and with the pod as gRPC metadata.

use super::*;

/// The result of a call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PluginCallError {
    /// No answer within [`CALL_TIMEOUT`].
    TimedOut,
    /// The plugin is away.
    Unavailable(String),
    /// The plugin answered with an error.
    Refused(String),
}

impl From<PluginCallError> for DeviceError {
    fn from(error: PluginCallError) -> Self {
        match error {
            PluginCallError::TimedOut => {
                let limit_s = CALL_TIMEOUT.as_secs();
                Self::NotReady(format!("the device plugin did not answer within {limit_s} s"))
            }
            PluginCallError::Unavailable(why) => {
                Self::NotReady(format!("the device plugin is not ready: {why}"))
            }
            PluginCallError::Refused(why) => Self::Refused(format!("the device plugin refused: {why}")),
        }
    }
}

pub(super) async fn preferred(
    client: &mut Client,
    owner: &DeviceOwner,
    available: &BTreeSet<String>,
    must_include: &BTreeSet<String>,
    asks: usize,
) -> Result<Vec<String>, PluginCallError> {
    let request = ContainerPreferredAllocationRequest {
        available_device_i_ds: available.iter().cloned().collect(),
        must_include_device_i_ds: must_include.iter().cloned().collect(),
        allocation_size: i32::try_from(asks).unwrap_or(i32::MAX),
    };
    let request = PreferredAllocationRequest { container_requests: vec![request] };
    let answer = call(owner, request, |request| client.get_preferred_allocation(request)).await?;
    Ok(answer.container_responses.into_iter().next().map(|one| one.device_i_ds).unwrap_or_default())
}

/// Calls a plugin for a pod. A plugin that does not respond, or ends during the call, may be restarting.
pub(super) async fn call<M, R, F>(
    owner: &DeviceOwner,
    message: M,
    send: impl FnOnce(Request<M>) -> F,
) -> Result<R, PluginCallError>
where
    F: Future<Output = Result<Response<R>, Status>>,
{
    let mut request = Request::new(message);
    owner.write(request.metadata_mut());
    match tokio::time::timeout(CALL_TIMEOUT, send(request)).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) if is_unavailable(&status) => {
            Err(PluginCallError::Unavailable(status.message().to_owned()))
        }
        Ok(Err(status)) => Err(PluginCallError::Refused(status.message().to_owned())),
        Err(_) => Err(PluginCallError::TimedOut),
    }
}

/// Whether the plugin is away. A status with a source was made on this side, by a connection that broke; its code
/// depends on the moment. One that the plugin sent has no source.
fn is_unavailable(status: &Status) -> bool {
    status.code() == tonic::Code::Unavailable || std::error::Error::source(status).is_some()
}

/// Connects to a plugin and reads its options, which replace those of its registration (as upstream).
pub(super) async fn connect(socket: &Path) -> Result<(Client, EndpointOptions), String> {
    let dial = async {
        let channel = serve::dial(socket).await?;
        let mut client = DevicePluginClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let options = client.get_device_plugin_options(Empty {}).await;
        let options = options.map_err(|status| status.message().to_owned())?.into_inner();
        let options = EndpointOptions {
            pre_start_required: options.pre_start_required,
            preferred_allocation: options.get_preferred_allocation_available,
        };
        Ok((client, options))
    };
    let timeout = tokio::time::timeout(DIAL_TIMEOUT, dial).await;
    timeout.unwrap_or_else(|_| Err(format!("no answer within {} s", DIAL_TIMEOUT.as_secs())))
}
