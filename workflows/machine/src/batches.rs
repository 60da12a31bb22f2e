//! ItemBatcher: groups items into batches, each the input of a child.

use mayfly_workflows_language::value::Value;

use super::stages::BatchLimits;

/// Groups items by a maximum number and a maximum size in bytes. Returns each group's input and number of items.
pub fn batched(items: impl Iterator<Item = Value>, limits: &BatchLimits) -> Vec<(Value, u64)> {
    let (count_max, bytes_max) = (limits.count_max, limits.bytes_max);
    let make = |items: Vec<Value>| {
        let count = items.len() as u64;
        let items = Value::from(items);
        let input = match &limits.batch_input {
            Some(batch_input) => Value::object([("BatchInput", batch_input.clone()), ("Items", items)]),
            None => Value::object([("Items", items)]),
        };
        (input, count)
    };
    let frame_bytes = make(Vec::new()).0.text_len() as u64;
    let (mut batches, mut batch, mut bytes) = (Vec::new(), Vec::new(), frame_bytes);
    for item in items {
        let more = item.text_len() as u64 + 1;
        let full = batch.len() as u64 >= count_max || bytes + more > bytes_max;
        if full && !batch.is_empty() {
            batches.push(make(std::mem::take(&mut batch)));
            bytes = frame_bytes;
        }
        bytes += more;
        batch.push(item);
    }
    if !batch.is_empty() {
        batches.push(make(batch));
    }
    batches
}
