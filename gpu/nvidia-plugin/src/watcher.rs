//! Watches the GPUs by the driver's events and by polling each one every second, on a separate thread: the calls block.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use mayfly_gpu_proto::process::monotonic_ns;
use nvml_wrapper::{
    Nvml,
    bitmasks::event::EventTypes,
    enums::event::XidError,
    error::{NvmlError, NvmlErrorWithSource},
    event::EventSet,
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    Gpu, GpuSource,
    health::{GpuFault, HealthRecords, fault_of_xid},
    instance_calls::GpuEvent,
    source::is_lost,
};

/// The longest wait for an event. NVML's utilization covers a period between a sixth of a second and a second, so it is
/// read as often.
const EVERY: Duration = Duration::from_secs(1);

/// Watches until `stop`, and updates the health in `gpus`.
pub(crate) struct HealthWatcher {
    pub(crate) source: GpuSource,
    pub(crate) records: HealthRecords,
    pub(crate) gpus: watch::Sender<Arc<Vec<Gpu>>>,
    pub(crate) stop: CancellationToken,
}

impl HealthWatcher {
    /// Starts the thread. It is not joined: a call of a broken driver may never return.
    pub(crate) fn start(self) {
        let started = std::thread::Builder::new().name("gpu-health".into()).spawn(move || self.run());
        if let Err(error) = started {
            tracing::error!(%error, "cannot watch the health of the GPUs");
        }
    }

    fn run(mut self) {
        let (nvml, calls) = (self.source.nvml(), self.source.calls());
        let events = match register(&nvml) {
            Ok(events) => Some(events),
            Err(error) => {
                tracing::warn!(%error, "the driver reports no errors of GPUs; only lost GPUs are detected");
                None
            }
        };
        let timeout_ms = u32::try_from(EVERY.as_millis()).unwrap_or(u32::MAX);
        let mut look_at_ns = 0;
        while !self.stop.is_cancelled() {
            match events.as_ref().map(|events| calls.wait(&nvml, events, timeout_ms)) {
                Some(Ok(event)) => self.note(&event),
                Some(Err(NvmlError::Timeout)) => {}
                // The poll below detects a lost GPU.
                Some(Err(_)) | None => std::thread::sleep(EVERY),
            }
            // Also while events follow one another closely.
            if monotonic_ns() >= look_at_ns {
                look_at_ns = monotonic_ns() + EVERY.as_nanos().try_into().unwrap_or(0);
                self.look();
                self.test();
                self.refresh();
            }
            self.publish();
        }
    }

    fn note(&mut self, event: &GpuEvent<'_>) {
        let data = &event.data;
        let fault = match data.event_data {
            Some(XidError::Value(number)) => fault_of_xid(number),
            Some(XidError::Unknown) => fault_of_xid(999),
            None if data.event_type.contains(EventTypes::DOUBLE_BIT_ECC_ERROR) => {
                Some(GpuFault::UncorrectedMemory)
            }
            // A corrected error.
            None => None,
        };
        match (data.device.uuid(), fault) {
            (Ok(uuid), Some(fault)) => {
                let source = self.source.clone();
                // An event of a GPU in MIG mode concerns one of its instances, or all.
                let gpus = source.gpus();
                let concerned = gpus.iter().filter(|gpu| match &gpu.mig {
                    Some(mig) => mig.parent == uuid && mig.is(event.gpu_instance, event.compute_instance),
                    None => gpu.uuid == uuid,
                });
                concerned.for_each(|gpu| self.report(&gpu.uuid, fault));
            }
            (Ok(uuid), None) => {
                tracing::info!(gpu = uuid, event = ?data.event_data, "an error of a program on a GPU")
            }
            // The device cannot report its UUID, so it is lost.
            (Err(_), _) => self.look(),
        }
    }

    fn report(&mut self, uuid: &str, fault: GpuFault) {
        tracing::warn!(gpu = uuid, %fault, "a GPU is not offered until it passes a self-test");
        self.records.report(uuid, fault, monotonic_ns());
    }

    /// Detects GPUs that the driver has lost, and measures the utilization of the others.
    fn look(&mut self) {
        let source = self.source.clone();
        for gpu in source.gpus().iter() {
            let is_known = self.records.fault(&gpu.uuid).is_some();
            match source.figures_of(gpu) {
                Err(error) if is_lost(&error) && !is_known => self.report(&gpu.uuid, GpuFault::Lost),
                _ => {}
            }
        }
    }

    fn test(&mut self) {
        let source = self.source.clone();
        for uuid in self.records.due(monotonic_ns()) {
            let gpus = source.gpus();
            let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == uuid) else { continue };
            let result = source.self_test(gpu);
            match &result {
                Ok(()) => tracing::info!(gpu = uuid, "a GPU passed its self-test and is offered again"),
                Err(reason) => tracing::info!(gpu = uuid, reason, "a GPU did not pass its self-test"),
            }
            self.records.tested(&uuid, result.is_ok(), monotonic_ns());
        }
    }

    /// Follows changes of MIG mode and of instances.
    fn refresh(&self) {
        match self.source.refresh() {
            Ok(true) => {
                let devices: Vec<_> = self.source.gpus().iter().map(Gpu::position).collect();
                tracing::info!(?devices, "the MIG instances of the GPUs changed");
            }
            Ok(false) => {}
            Err(error) => tracing::debug!(%error, "cannot read the MIG instances of the GPUs"),
        }
    }

    fn publish(&self) {
        let current = |gpu: &Gpu| Gpu {
            fault: self.records.fault(&gpu.uuid),
            faults: self.records.faults(&gpu.uuid),
            ..gpu.clone()
        };
        let gpus: Vec<Gpu> = self.source.gpus().iter().map(current).collect();
        self.gpus.send_if_modified(|known| {
            let is_news = **known != gpus;
            if is_news {
                *known = Arc::new(gpus);
            }
            is_news
        });
    }
}

/// Registers for the events of GPUs that report any; those of instances are the events of their GPU. NVML drops a set
/// with which a GPU cannot be registered.
fn register(nvml: &Nvml) -> Result<EventSet<'_>, NvmlError> {
    let mut silent: BTreeSet<u32> = BTreeSet::new();
    loop {
        let set = nvml.create_event_set()?;
        let spoken = (0..nvml.device_count()?).filter(|index| !silent.contains(index));
        match register_all(nvml, spoken, set) {
            Ok(set) => return Ok(set),
            Err((index, error)) => {
                tracing::warn!(index, ?error, "a GPU reports no errors; only its loss is detected");
                silent.insert(index);
            }
        }
    }
}

fn register_all<'nvml>(
    nvml: &'nvml Nvml,
    indices: impl Iterator<Item = u32>,
    mut set: EventSet<'nvml>,
) -> Result<EventSet<'nvml>, (u32, NvmlErrorWithSource)> {
    let wanted = EventTypes::CRITICAL_XID_ERROR | EventTypes::DOUBLE_BIT_ECC_ERROR;
    for index in indices {
        let failed = |error: NvmlErrorWithSource| (index, error);
        let device = nvml.device_by_index(index).map_err(|error| failed(error.into()))?;
        let supported = device.supported_event_types().map_err(|error| failed(error.into()))?;
        set = device.register_events(wanted & supported, set).map_err(failed)?;
    }
    Ok(set)
}
