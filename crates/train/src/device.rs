//! What devices can do, by name: for MFU and for the floors of operations.

use temper_tensor::Rates;

/// A device as its data sheet has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Device {
    /// Dense bf16 peak with f32 accumulation, FLOPs a second.
    pub peak_flops: f64,
    /// Bandwidth of its memory, bytes a second.
    pub bandwidth: f64,
}

/// Part of a device's name, TFLOP/s, TB/s; the first that fits counts, so special forms stand before plain ones.
const DEVICES: [(&str, f64, f64); 12] = [
    ("H200 NVL", 835.5, 4.8),
    ("H200", 989.4, 4.8),
    ("H20", 148.0, 4.0),
    ("H100 PCIe", 756.5, 2.0),
    ("H100 NVL", 835.5, 3.9),
    ("H100", 989.4, 3.35),
    ("H800", 989.4, 3.35),
    ("B200", 2250.0, 8.0),
    ("A100-SXM4-80GB", 312.0, 2.039),
    ("A100", 312.0, 1.555),
    ("A800", 312.0, 2.039),
    ("L40S", 362.0, 0.864),
];

/// Share of the bandwidth that a plain copy reaches: 4.3 of 4.8 TB/s on an H200.
const COPY: f64 = 4.3 / 4.8;
/// Share of the peak that the best products reach within the power limit: 700 of 989.4 TFLOP/s on an H200.
const PRODUCT: f64 = 700.0 / 989.4;

impl Device {
    /// The device that a backend's name mentions; none for processors and unknown ones.
    pub fn of(backend: &str) -> Option<Device> {
        let found = DEVICES.iter().find(|(name, ..)| backend.contains(name))?;
        Some(Device { peak_flops: found.1 * 1e12, bandwidth: found.2 * 1e12 })
    }

    /// What the best programs reach, which operations are measured against.
    pub fn rates(&self) -> Rates {
        Rates { bytes_per_s: self.bandwidth * COPY, flops_per_s: self.peak_flops * PRODUCT }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart() {
        let peak = |name: &str| Device::of(name).map(|d| (d.peak_flops / 1e12, d.bandwidth / 1e12));
        assert_eq!(peak("cuda (NVIDIA H200, compute capability 9.0)"), Some((989.4, 4.8)));
        assert_eq!(peak("cuda (NVIDIA H20, compute capability 9.0)"), Some((148.0, 4.0)));
        assert_eq!(peak("cuda (NVIDIA H100 80GB HBM3, compute capability 9.0)"), Some((989.4, 3.35)));
        assert_eq!(peak("cuda (NVIDIA H100 PCIe, compute capability 9.0)"), Some((756.5, 2.0)));
        assert_eq!(peak("cpu (2 threads)"), None);
    }

    #[test]
    fn floors_of_an_h200_are_the_measured_rates() {
        let rates = Device::of("NVIDIA H200").unwrap().rates();
        assert!((rates.bytes_per_s / 4.3e12 - 1.0).abs() < 1e-12 && (rates.flops_per_s / 700e12 - 1.0).abs() < 1e-12);
    }
}
