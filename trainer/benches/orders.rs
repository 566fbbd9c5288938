//! What a training step pays for orders: the question whether there are new ones every step, and the news when there are.
#![allow(missing_docs)]

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use flexcomm_domain::{Decision, JobId, Timestamp, Version};
use flexcomm_trainer::OrdersSlot;
use flexcomm_wire::{DecisionOrder, JobOrders};
use std::hint::black_box;

fn bench(criterion: &mut Criterion) {
    let job = JobId::new("j").expect("a name");
    let decision = Decision {
        job: job.clone(),
        version: Version(1),
        parent: Version(0),
        plan: "topk@0.01/allgather".parse().expect("a strategy"),
        decided_at: Timestamp(0),
        reason: "bandwidth fell from 10 to 1 Gbit/s".into(),
    };
    let orders = JobOrders { job: job.clone(), decision: Some(DecisionOrder::from(&decision)), trial: None };
    let slot = OrdersSlot::new(job, None);
    criterion.bench_function("orders: has it changed", |b| b.iter(|| black_box(&slot).poll().is_none()));
    criterion.bench_function("orders: take a decision", |b| {
        b.iter_batched(|| slot.put(&orders), |()| slot.poll(), BatchSize::PerIteration);
    });
    criterion.bench_function("orders: check and put a decision, in the client's thread", |b| {
        b.iter(|| slot.put(black_box(&orders)));
    });
}

criterion_group!(benches, bench);
criterion_main!(benches);
