//! What the best programs reach of a device's data sheet, which operations are measured against.

use temper_config::Device;
use temper_tensor::Rates;

/// Share of the bandwidth that a plain copy reaches: 4.3 of 4.8 TB/s on an H200.
const COPY: f64 = 4.3 / 4.8;
/// Share of the peak that the best products reach within the power limit: 700 of 989.4 TFLOP/s on an H200.
const PRODUCT: f64 = 700.0 / 989.4;

/// The rates of the best programs on a device.
pub fn best_rates(device: &Device) -> Rates {
    Rates { bytes_per_s: device.memory_tb_s * 1e12 * COPY, flops_per_s: device.peak() * PRODUCT }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floors_of_an_h200_are_the_measured_rates() {
        let rates = best_rates(&Device::of("NVIDIA H200").unwrap());
        assert!((rates.bytes_per_s / 4.3e12 - 1.0).abs() < 1e-12 && (rates.flops_per_s / 700e12 - 1.0).abs() < 1e-12);
    }
}
