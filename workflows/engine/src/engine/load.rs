//! From the journal back to a machine, and to a history.

use std::sync::Arc;

use mayfly_workflows_language::dataflow::Verdict;
use mayfly_workflows_language::definition::StateMachineType;
use serde::Deserialize;

use super::inner::Inner;
use super::types::StartedMachine;
use mayfly_workflows_journal::{ExecutionRow, JournalError, RecordRow};
use mayfly_workflows_machine::history::HistoryEvent;
use mayfly_workflows_machine::{EDITION, Event, Facts, Machine, Output};

/// An event as a record, with the evaluations that the wall clock ended.
pub(super) fn record_of(event: &Event, verdicts: &[Verdict]) -> Result<Vec<u8>, serde_json::Error> {
    if verdicts.is_empty() {
        return serde_json::to_vec(event);
    }
    let mut record = serde_json::to_value(event)?;
    record[CLOCK] = serde_json::to_value(verdicts)?;
    serde_json::to_vec(&record)
}

/// The member of a record that [`record_of`] adds to an event's.
const CLOCK: &str = "clock";

fn verdicts_of(record: &[u8]) -> Result<Vec<Verdict>, JournalError> {
    #[derive(Deserialize)]
    struct Noted {
        #[serde(default)]
        clock: Vec<Verdict>,
    }
    // Few have any, and many are large.
    let member = b"\"clock\":";
    if !record.windows(member.len()).any(|window| window == member) {
        return Ok(Vec::new());
    }
    let noted: Noted = serde_json::from_slice(record).map_err(|error| damaged("records", error))?;
    Ok(noted.clock)
}

fn damaged(table: &'static str, reason: impl ToString) -> JournalError {
    JournalError::RowDamaged { table, reason: reason.to_string() }
}

impl Inner {
    /// An execution's row with its payloads.
    pub(super) fn row_with_payloads(&self, mut row: ExecutionRow) -> Result<ExecutionRow, JournalError> {
        row.input = mayfly_workflows_journal::loaded(row.input, &*self.journal)?;
        row.outcome.output = row
            .outcome
            .output
            .map(|output| mayfly_workflows_journal::loaded(output, &*self.journal))
            .transpose()?;
        Ok(row)
    }

    /// A fresh machine for an execution; [`JournalError::UnknownEdition`] if it has other rules than this version's.
    pub(super) fn machine_for(
        &self,
        row: &ExecutionRow,
        state_machine: &StartedMachine,
    ) -> Result<Machine, JournalError> {
        if row.birth.edition != EDITION {
            let edition = row.birth.edition;
            return Err(JournalError::UnknownEdition { execution: row.id, edition, known: EDITION });
        }
        let json = row.input.json().ok_or_else(|| damaged("executions", "the input is not loaded"))?;
        let input = json.value().map_err(|error| damaged("executions", error))?;
        let [partition, region, account] = self.config.scope_of(&state_machine.arn);
        let facts = Facts {
            execution: row.id,
            arn: row.arn.clone(),
            name: row.name.as_str().into(),
            role_arn: state_machine.role_arn.as_str().into(),
            machine_arn: state_machine.arn.clone(),
            machine_name: state_machine.name.as_str().into(),
            express: state_machine.kind == StateMachineType::Express,
            version_arn: row.version_arn.clone(),
            alias_arn: row.alias_arn.clone(),
            input_text: json.text().clone(),
            input,
            start_ms: row.start_ms,
            seed: row.birth.seed,
            partition: partition.into(),
            region: region.into(),
            account: account.into(),
            flow: state_machine.flow.unwrap_or_else(|| state_machine.definition.root()),
            map_run_arn: row.map_run_arn.clone(),
            limits: self.config.limits.execution,
            starts_deferred: row.birth.starts_deferred,
        };
        Ok(Machine::new(Arc::new(facts), state_machine.definition.clone()))
    }

    /// Recomputes an execution from its records, with its history if `history`. Returns the machine and the last
    /// record's sequence number.
    pub(super) fn replay(
        &self,
        row: &ExecutionRow,
        state_machine: &StartedMachine,
        history: bool,
    ) -> Result<(Machine, u64, Vec<HistoryEvent>), JournalError> {
        if history {
            // A history is computed from the first record on.
            let out = Output { history: Some(Vec::new()), ..Output::default() };
            return self.replay_records(row, state_machine, None, self.journal.records(row.id, 0)?, out);
        }
        let checkpoint = self.journal.checkpoint(row.id)?;
        let records = self.journal.records(row.id, checkpoint.as_ref().map_or(0, |(seq, _)| *seq))?;
        self.replay_records(row, state_machine, checkpoint, records, Output::default())
    }

    /// The same from what was read already: a checkpoint, and all records after it.
    pub(super) fn replay_records(
        &self,
        row: &ExecutionRow,
        state_machine: &StartedMachine,
        checkpoint: Option<(u64, Vec<u8>)>,
        mut records: Vec<RecordRow>,
        mut out: Output,
    ) -> Result<(Machine, u64, Vec<HistoryEvent>), JournalError> {
        let mut machine = self.machine_for(row, state_machine)?;
        let is_checkpointed = checkpoint.is_some();
        let restored = checkpoint.and_then(|(seq, body)| {
            let facts = machine.facts().clone();
            Some((Machine::from_checkpoint(facts, state_machine.definition.clone(), &body)?, seq))
        });
        let mut last = 0;
        match restored {
            Some(restored) => (machine, last) = restored,
            None => {
                if is_checkpointed {
                    // It cannot be read: all records are applied.
                    records = self.journal.records(row.id, 0)?;
                }
                out.recorded_verdicts = row.birth.clock.clone();
                machine.apply(row.start_ms, 0, Event::Start, &mut out);
            }
        }
        for record in records {
            if record.seq != last + 1 {
                return Err(damaged(
                    "records",
                    format!("record {} of execution {} is missing", last + 1, row.id),
                ));
            }
            last = record.seq;
            let mut event: Event =
                serde_json::from_slice(&record.body).map_err(|error| damaged("records", error))?;
            if let Some(payload) = event.payload_mut() {
                *payload = mayfly_workflows_journal::loaded(payload.clone(), &*self.journal)?;
            }
            out.actions.clear();
            out.recorded_verdicts = match row.birth.clock {
                Some(_) => Some(verdicts_of(&record.body)?),
                None => None,
            };
            machine.apply(record.at_ms, record.seq, event, &mut out);
        }
        Ok((machine, last, out.history.unwrap_or_default()))
    }
}
