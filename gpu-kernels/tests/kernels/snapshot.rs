//! Checkpoint and restore: what fits, where it goes, and every bit back.

use crate::emulated::{Emulated, Memory};
use flexcomm_compression::random::Stream;
use flexcomm_gpu_kernels::snapshot::{Free, Plan, SnapshotError};
use flexcomm_gpu_kernels::{LaunchError, Span};
use proptest::prelude::*;

/// Bytes of every pattern, NaNs among them.
fn content(bytes: usize, which: u64) -> Vec<u8> {
    let stream = Stream::new(which, [1; 4]);
    (0..bytes as u32).map(|i| stream.word(i) as u8).collect()
}

fn spans(tensors: &[Memory]) -> Vec<Span> {
    tensors.iter().map(Memory::span).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Whatever is free: either every bit comes back over what a trial wrote, in no more memory than was given, or it is
    /// refused, exactly when all of it together is too little.
    #[test]
    fn every_bit_comes_back_or_it_is_refused(
        sizes in prop::collection::vec(0usize..3000, 0..12),
        device_free in 0u64..12_000,
        host_free in 0u64..12_000,
        seed: u64,
    ) {
        let Some(device) = Emulated::new(seed) else { return Ok(()) };
        let bytes: Vec<u64> = sizes.iter().map(|n| *n as u64).collect();
        let needed: u64 = bytes.iter().map(|b| b.next_multiple_of(256)).sum();
        let plan = Plan::new(&bytes, Free { device: device_free, host: host_free });
        let fits = needed <= device_free / 256 * 256 + host_free / 256 * 256;
        prop_assert_eq!(plan.is_ok(), fits);
        let Ok(plan) = plan else { return Ok(()) };
        let Free { device: on_device, host } = plan.needs();
        prop_assert!(on_device <= device_free && host <= host_free && on_device + host == needed);
        let before: Vec<Vec<u8>> = sizes.iter().zip(seed..).map(|(n, which)| content(*n, which)).collect();
        let tensors: Vec<Memory> = before.iter().map(|bytes| Memory::of(bytes)).collect();
        let kept = (Memory::new(on_device), Memory::new(host));
        plan.save(&device, &spans(&tensors), (kept.0.span(), kept.1.span())).unwrap();
        // A trial: other content in the same places.
        for (tensor, which) in tensors.iter().zip(seed.wrapping_add(99)..) {
            let other = Memory::of(&content(tensor.span().bytes() as usize, which));
            flexcomm_gpu_kernels::Device::copy(&device, tensor.span(), other.span()).unwrap();
        }
        for _ in 0..2 {
            plan.restore(&device, &spans(&tensors), (kept.0.span(), kept.1.span())).unwrap();
            for (tensor, before) in tensors.iter().zip(&before) {
                prop_assert_eq!(&tensor.bytes(), before);
            }
        }
        // Guards around what it was kept in.
        let _ = (kept.0.bytes(), kept.1.bytes());
    }
}

#[test]
fn what_does_not_fit_names_bytes_and_remedy() {
    let error = Plan::new(&[1 << 30, 100], Free { device: 1 << 20, host: 512 }).unwrap_err();
    let text = error.to_string();
    for word in ["1073742080 bytes", "1048576 may be used on the device", "512 of the host", "1072692992 bytes too few"]
    {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert!(text.contains("empty_cache") && text.contains("shadow trials"), "{text}");
    let beyond = Plan::new(&[u64::MAX, u64::MAX], Free { device: 0, host: 0 }).unwrap_err();
    assert!(matches!(beyond, SnapshotError::DoesNotFit { needed: u64::MAX, .. }));
}

#[test]
fn tensors_that_changed_and_memory_that_is_short_are_refused() {
    let Some(device) = Emulated::new(0) else { return };
    let plan = Plan::new(&[300, 300], Free { device: 512, host: 10_000 }).unwrap();
    assert_eq!(plan.needs(), Free { device: 512, host: 512 });
    let tensors = [Memory::new(300), Memory::new(300)];
    let kept = (Memory::new(512), Memory::new(512));
    let memory = (kept.0.span(), kept.1.span());
    assert!(plan.save(&device, &spans(&tensors), memory).is_ok());
    let fewer = plan.restore(&device, &spans(&tensors)[..1], memory).unwrap_err();
    assert!(matches!(fewer, SnapshotError::Changed { tensor: 1, planned: Some(300), got: None }), "{fewer}");
    let other = [Memory::new(300), Memory::new(301)];
    let longer = plan.restore(&device, &spans(&other), memory).unwrap_err();
    assert!(matches!(longer, SnapshotError::Changed { tensor: 1, got: Some(301), .. }), "{longer}");
    let short = plan.save(&device, &spans(&tensors), (kept.0.span(), Span::NONE)).unwrap_err();
    assert!(matches!(short, SnapshotError::Launch(LaunchError::TooSmall { need: 512, .. })), "{short}");
}
