//! A connection to containerd: sets the namespace on every request, and maps errors to [`RuntimeError`].

use std::{path::Path, time::Duration};

use containerd_client::{
    services::v1::{
        containers_client::ContainersClient, content_client::ContentClient, diff_client::DiffClient,
        images_client::ImagesClient, leases_client::LeasesClient,
        snapshots::snapshots_client::SnapshotsClient, tasks_client::TasksClient,
    },
    tonic::{Code, Request, Status, metadata::MetadataValue, transport::Channel},
};
use mayfly_runtime::RuntimeError;

/// The containerd namespace of all objects that Mayfly creates.
pub(crate) const NAMESPACE: &str = "mayfly";
/// The snapshotter that every supported kernel has.
pub(crate) const SNAPSHOTTER: &str = "overlayfs";
/// The maximum size of one message, in bytes: an image's manifest or a container's spec is a few KiB, a listing of
/// 1,000 containers a few MiB.
const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// The timeout of a connection to the socket.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection to containerd. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Containerd {
    channel: Channel,
}

impl Containerd {
    pub(crate) async fn connect(socket: &Path) -> Result<Self, RuntimeError> {
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, containerd_client::connect(socket)).await;
        let channel = connected
            .map_err(|_| {
                RuntimeError::Internal(format!("containerd at {} does not answer", socket.display()))
            })?
            .map_err(|error| {
                RuntimeError::Internal(format!(
                    "cannot connect to containerd at {}: {error}",
                    socket.display()
                ))
            })?;
        Ok(Self { channel })
    }

    pub(crate) fn containers(&self) -> ContainersClient<Channel> {
        ContainersClient::new(self.channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX)
    }

    pub(crate) fn tasks(&self) -> TasksClient<Channel> {
        TasksClient::new(self.channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX)
    }

    pub(crate) fn content(&self) -> ContentClient<Channel> {
        ContentClient::new(self.channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX)
    }

    pub(crate) fn images(&self) -> ImagesClient<Channel> {
        ImagesClient::new(self.channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX)
    }

    pub(crate) fn snapshots(&self) -> SnapshotsClient<Channel> {
        SnapshotsClient::new(self.channel.clone())
    }

    pub(crate) fn diff(&self) -> DiffClient<Channel> {
        DiffClient::new(self.channel.clone())
    }

    pub(crate) fn leases(&self) -> LeasesClient<Channel> {
        LeasesClient::new(self.channel.clone())
    }
}

/// A request in Mayfly's namespace.
pub(crate) fn request<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("containerd-namespace", MetadataValue::from_static(NAMESPACE));
    request
}

/// A request under a lease, which protects new content and snapshots from containerd's garbage collection.
pub(crate) fn leased<T>(message: T, lease: &str) -> Request<T> {
    let mut request = request(message);
    if let Ok(value) = lease.parse() {
        request.metadata_mut().insert("containerd-lease", value);
    }
    request
}

/// Maps an error of the operation `what`.
pub(crate) fn failed(what: &str) -> impl Fn(Status) -> RuntimeError + '_ {
    move |status| {
        let message = status.message();
        match status.code() {
            Code::InvalidArgument => RuntimeError::Invalid(format!("{what}: {message}")),
            Code::ResourceExhausted => RuntimeError::NoRoom(format!("{what}: {message}")),
            _ => RuntimeError::Internal(format!("{what}: {message}")),
        }
    }
}

/// Maps "not found" to `None`, for removals of objects that may not exist.
pub(crate) fn or_absent<T>(result: Result<T, Status>) -> Result<Option<T>, Status> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(status) if status.code() == Code::NotFound => Ok(None),
        Err(status) => Err(status),
    }
}

/// Whether the connection failed, as opposed to the request.
pub(crate) fn is_disconnected(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal)
}
