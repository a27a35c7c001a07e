/* data_format.h - the one word that settings and data share. */
#ifndef QEFFECT_DATA_FORMAT_H
#define QEFFECT_DATA_FORMAT_H

typedef enum qe_data_format {
    QE_DATA_AUTO,  /* tokens when the file starts with their magic number, else text */
    QE_DATA_TEXT,  /* UTF-8; every byte is one token */
    QE_DATA_TOKENS /* llm.c's layout: 256 int32 of header, then uint16 tokens */
} qe_data_format;

#endif
