//! What a trainer pays: "has it changed" every step, a read when it has.
#![allow(missing_docs)]

use criterion::{Criterion, criterion_group, criterion_main};
use flexcomm_page::{PageReader, PageWriter};
use std::hint::black_box;

fn bench(criterion: &mut Criterion) {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a tmpfs at /dev/shm");
    let path = dir.path().join("bench.page");
    let mut writer = PageWriter::create(&path).expect("a page");
    // A typical order of one job with a decision.
    writer.publish(&[b'x'; 480]).expect("fits");
    let mut reader = PageReader::open(&path).expect("a reader");
    let mut out = Vec::new();
    criterion.bench_function("page: has it changed", |b| b.iter(|| black_box(reader.counter())));
    criterion.bench_function("page: read 480 bytes", |b| b.iter(|| reader.read(black_box(&mut out)).expect("quiet")));
    criterion.bench_function("page: publish 480 bytes", |b| b.iter(|| writer.publish(black_box(&[b'y'; 480]))));
}

criterion_group!(benches, bench);
criterion_main!(benches);
