/* product_device.h - what launches of a product with its second part need to know of a device; made once per process
 * and device, then read only. */
#ifndef QE_CUDA_PRODUCT_DEVICE_H
#define QE_CUDA_PRODUCT_DEVICE_H

#include <stdint.h>

typedef struct qe_product_device {
    void *encode;      /* the driver's cuTensorMapEncodeTiled; NULL: there is none */
    uint32_t clusters; /* of the kernel, that the device has at work at a time */
} qe_product_device;

#endif
